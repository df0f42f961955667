"""Training: one compiled program per step, the loop around it, logs, stopping, optimizers.

Read `loop.py`, then `engines/tensorflow.py` or `engines/jax.py`, then `optimization.py`.
"""
