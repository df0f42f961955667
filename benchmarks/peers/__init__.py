"""Other programs that do the same work: a plain BERT, transformers and a padding-free BERT on torch."""
