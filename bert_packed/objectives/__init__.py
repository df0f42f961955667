"""What is learnt: losses as sums over sequences, their denominators, the figures that come of them, and which
arrays of a batch all this reads.

Read `features.py`, `objective.py`, then one that fills it in: `pretraining.py`, `next_tokens.py`,
`answers.py`, `classes.py`, `tags.py`.
"""
