"""The step and the loop around it: one compiled program a step, logs, stops, the optimizers.

Read `loop.py`, then `engines/tensorflow.py` or `engines/jax.py`, then `optimization.py`.
"""
