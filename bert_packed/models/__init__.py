"""Layers, packed encoders, and heads that give outputs for every sequence of a pack.

Read `packed_model.py`, then BERT: `context.py`, `layers.py`, `modeling.py`, `heads.py`; or
ModernBERT: `modern_bert.py`; or Mamba: `causal_convolution.py`, `selective_scan.py`, `mamba.py`, and
Mamba-2: `state_space_duality.py`, `mamba2.py`. Kernels for GPUs and TPUs: `kernels.py`.
"""
