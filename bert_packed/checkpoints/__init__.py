"""Weights on disk: our checkpoints, those of Hugging Face and Google, and exports for other programs.

Read `checkpoint.py`; then `pretrained_names.py`, the table of names, `starting_weights.py` and
`export_formats.py`.
"""
