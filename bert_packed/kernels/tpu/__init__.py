"""Kernels for TPUs, by Mosaic."""
