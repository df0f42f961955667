"""Parts of a run: its directory, its data, its engine, what it prints.

Read `run_directory.py`, then `pretraining.py` or `finetuning.py` from top to bottom.
"""
