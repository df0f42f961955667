"""Fused Pallas kernels by device; `choose` has a row for each."""
