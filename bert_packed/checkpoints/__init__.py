"""Weights on disk: our checkpoints, those of Hugging Face and Google, and exports for other programs.

Read `checkpoint.py`; then `tensor_names.py`, `bert_names.py`, `modern_bert_names.py` and `mamba_names.py`;
`starting_weights.py`, `kept_optimizer.py` and `export_formats.py`.
"""
