"""Packing algorithms on length histograms: NumPy and SciPy only, usable as a library without TensorFlow."""
