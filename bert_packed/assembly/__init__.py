"""Plan and sequences become packs: which sequence goes into which slot of which pack, and the packs' arrays.

Read `length_plan.py`, `assignment.py`, `assemble.py`; then `pack_config.py`, `pack_data.py` (what packing
asks of records), `pack_steps.py` and `pack_job.py`, the command's work on files of any size. Where sequences
may be cut across packs, it is `rows.py`, `row_steps.py` and `row_job.py`.
"""
