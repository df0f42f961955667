"""How the parts of a run fit together: its directory, its data, its engine, what it tells people.

Read `run_directory.py`, then `pretraining.py` or `finetuning.py` from top to bottom.
"""
