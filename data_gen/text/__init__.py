"""Text becomes records: documents, tokens, and for BERT sentence pairs and masks.

Read `corpus.py` and `tables.py`, `tokenization.py`, `instances.py`, `masking.py`; for causal language
modelling `byte_bpe.py`, `token_streams.py`, `causal_records.py`; then `sources.py` and `passes.py` (how often
which documents are read), `text_records.py` (what making records asks of an objective), `create_config.py`,
`create_steps.py` and `create_job.py`, the command's work on files of any size.
"""
