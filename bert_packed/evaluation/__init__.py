"""Evaluation of models: isolation of sequences, scores of tasks, vectors of texts.

Read `contamination.py` for the proof that packs do not leak; `squad_predictions.py`, `squad_scores.py`,
`glue_predictions.py`, `glue_metrics.py` and `entity_scores.py` for scores; `inference.py` for vectors.
"""
