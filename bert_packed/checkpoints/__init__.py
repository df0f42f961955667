"""Weights on disk: our checkpoints, those of Hugging Face and Google, and exports for other programs.

Read `checkpoint.py`; then `starting_weights.py`, `kept_optimizer.py` and `export_formats.py`.
"""
