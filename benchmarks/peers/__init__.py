"""Other programs that do the same work: a BERT without packs, transformers on torch, KerasHub."""
