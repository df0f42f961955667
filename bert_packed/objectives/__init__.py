"""Training objectives: losses as sums over sequences, their denominators, and the arrays of a batch.

Read `features.py`, `objective.py`, then `pretraining.py`.
"""
