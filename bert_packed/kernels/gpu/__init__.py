"""Kernels for NVIDIA's GPUs, by Triton."""
