"""The network: layers, the packed encoder with its mask, and the heads on every sequence of a pack.

Read `packed_model.py`, then BERT: `layers.py`, `modeling.py`, `heads.py`; or Mamba: `causal_convolution.py`,
`selective_scan.py`, `mamba.py`. `dropout.py`, `flash_attention.py` and `loops.py` when they matter.
"""
