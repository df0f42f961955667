"""Batches of packs, from pre-training records or from labelled sequences for fine-tuning.

Read `read_order.py`, `input_pipeline.py`, `batches.py`.
"""
