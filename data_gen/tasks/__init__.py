"""Labelled data for fine-tuning: SQuAD and GLUE as sequences, and packs for every update.

Read `squad.py` and `squad_windows.py`, or `glue.py`; then `update_packs.py`.
"""
