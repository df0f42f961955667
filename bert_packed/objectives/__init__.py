"""What is learnt: losses as sums over sequences, their denominators, and the figures that come of them.

Read `losses.py` and `metrics.py`.
"""
