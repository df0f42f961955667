"""One command for each table, figure or benchmark: `python -m benchmarks.NAME`.

Read any of them alone; `packing_tables.py` is the simplest.
"""
