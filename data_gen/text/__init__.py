"""Text becomes records: documents, tokens, and for BERT sentence pairs and masks.

Read `corpus.py`, `token_corpus.py`, `instances.py`, `bert_records.py`, for causal language modelling
`causal_records.py`; then `sources.py` and `document_sampling.py` (the files, and how often each document is
read), `create_steps.py` and `create_job.py`, the command's work on files of any size.
"""
