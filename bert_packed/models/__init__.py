"""The network: layers, the packed encoder with its mask, and the heads on every sequence of a pack.

Read `packed_model.py`, then BERT: `context.py`, `layers.py`, `modeling.py`, `heads.py`; or Mamba:
`selective_scan.py`, `mamba.py`. `dropout.py`, `flash_attention.py` and `cpu_gradients.py` when they matter.
"""
