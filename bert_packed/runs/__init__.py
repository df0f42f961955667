"""A pre-training run: its directory, its data, its engine, what it prints.

Read `run_directory.py`, then `pretraining.py` from top to bottom.
"""
