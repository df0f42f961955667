"""Proofs and forecasts: are all sequences in the packs once, and what would other lengths and depths give.

Read `digests.py`, `multiset.py` and `verification.py`; then `dry_run.py` and `pictures.py`.
"""
