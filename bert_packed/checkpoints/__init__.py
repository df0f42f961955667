"""Weights on disk: our checkpoints, those of Hugging Face and Google, and exports for other programs.

Read `checkpoint.py`; then `tensor_names.py` and the tables that fill it in, `bert_names.py` and
`mamba_names.py`; `starting_weights.py`, `kept_optimizer.py` and `export_formats.py`.
"""
