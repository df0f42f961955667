"""Assembly of packs in memory, from sequences and a plan.

Read `assignment.py` (sequences to slots of packs, or to places in rows); then the kinds of records,
`record_kinds.py` and `feature_packs.py`. `data_gen/pack_steps.py` does the same for files of any size.
"""
