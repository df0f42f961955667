"""Batches of packs from pre-training records.

Read `read_order.py`, `input_pipeline.py`, `batches.py`.
"""
