"""Tokenizers, vocabularies and masking: what both halves know of text."""
