"""Plan and sequences become packs, in memory.

Read `assignment.py` (which sequence goes to which slot of which pack) and `packs.py`; then `record_kind.py`
and the kinds of records: `bert_packs.py`, `causal_packs.py`, `feature_packs.py`. `rows.py` cuts sequences
across packs. `data_gen/pack_steps.py` does the same with files of any size.
"""
