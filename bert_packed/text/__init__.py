"""Tokenizers, vocabularies and masking."""
