"""Mamba-2 (Dao and Gu 2024)."""
