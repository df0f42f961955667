"""Packing algorithms on length histograms: NumPy, SciPy and HiGHS, usable without TensorFlow.

Read `histogram.py`, `plan.py`, `descending.py`, `bounds.py`; then `column_generation.py` with what it calls.
"""
