"""Fine-tuning tasks, a folder each: files to sequences, objective, predictions, scores.

Read `registry.py`; `config.py`, `run.py` and `batches.py`, which all tasks share; then a task's `task.py`.
"""
