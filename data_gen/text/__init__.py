"""Text becomes instances: documents, WordPieces, sentence pairs and masks.

Read `corpus.py`, `tokenization.py`, `instances.py`, `masking.py`; then `create_config.py`,
`create_steps.py` and `create_job.py`, the command's work on files of any size.
"""
