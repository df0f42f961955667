"""Records from text: documents, tokens, and for BERT sentence pairs and masks.

Read `corpus.py`, `token_corpus.py`, `instances.py`, `text_records.py`; then `sources.py` (files, and
readings of each document), `create_steps.py` and `create_job.py` (the command, for files of any size).
"""
