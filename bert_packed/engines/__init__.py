"""Compiled training steps, one file per backend."""
