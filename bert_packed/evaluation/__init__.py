"""Evaluation of models: isolation of sequences, vectors of texts.

Read `contamination.py` for the proof that packs do not leak, `inference.py` for vectors.
"""
