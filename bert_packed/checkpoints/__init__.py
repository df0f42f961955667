"""Weights on disk: our checkpoints, those of Hugging Face and Google, and exports for other programs.

Read `checkpoint.py`; then `starting_weights.py`, `pretrained_files.py` and `export_formats.py`.
"""
