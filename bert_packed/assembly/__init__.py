"""Assembly of packs in memory, from sequences and a plan.

Read `assignment.py` (sequences to slots of packs) and `packs.py`; then `record_kind.py` and the kinds of
records: `bert_packs.py`, `causal_packs.py`, `feature_packs.py`. `rows.py` cuts sequences across packs.
`data_gen/pack_steps.py` does the same for files of any size.
"""
