"""Labelled data for fine-tuning: SQuAD, GLUE and tagged words as sequences, and packs for every update.

Read `squad.py` and `squad_windows.py`, or `glue.py`, or `conll.py`; then `update_packs.py`.
"""

from bert_packed.tasks.glue import SERVER_NAMES

# Files that the tasks write to an output directory; a run that starts there removes them
RESULT_FILES = (
    *("labels.txt", "predictions.txt"),
    *(f"predictions{ending}.tsv" for ending in ("", "_matched", "_mismatched")),
    *(f"{name}.tsv" for name in SERVER_NAMES),
    *("predictions.json", "nbest_predictions.json", "null_odds.json"),
)
