"""The network: layers, the packed encoder with its mask, and the heads on every sequence of a pack.

Read `layers.py`, `modeling.py`, `heads.py`; `dropout.py` and `flash_attention.py` when they matter.
"""
