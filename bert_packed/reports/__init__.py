"""One command for each table, figure or benchmark: `python -m bert_packed.reports.NAME`."""
