"""Assembly of packs in memory, from sequences and a plan.

Read `assignment.py` (sequences to slots of packs); then the kinds of records, `record_kinds.py` and
`feature_packs.py`. `rows.py` cuts sequences across packs.
`data_gen/pack_steps.py` does the same for files of any size.
"""
