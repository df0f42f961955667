"""Packing algorithms on length histograms: NumPy, SciPy and HiGHS, usable without TensorFlow.

Read `histogram.py`, `plan.py`, `lpfhp.py`, `bounds.py`; then `column_generation.py` with what it calls.
"""
