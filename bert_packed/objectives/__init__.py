"""What is learnt: losses as sums over sequences, their denominators and figures, and the arrays of a batch.

Read `features.py`, `objective.py`, then one that fills it in: `pretraining.py`, `next_tokens.py`,
`finetuning.py`.
"""
