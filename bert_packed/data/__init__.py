"""Batches of packs for a step: from records of pre-training, or from labelled sequences of fine-tuning.

Read `read_order.py`, `input_pipeline.py`, `batches.py`.
"""
