"""Mamba (Gu and Dao 2023)."""
