"""Architectures: a folder each with config, model and names in checkpoints; `registry` has a row for each."""
