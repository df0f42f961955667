"""Labelled data for fine-tuning: SQuAD, GLUE and tagged words as sequences, and packs for every update.

Read `squad.py` and `squad_windows.py`, or `glue.py`, or `conll.py`; then `update_packs.py`.
"""
