"""Packing algorithms on length histograms: NumPy, SciPy and HiGHS, usable without TensorFlow."""
