"""Which devices and processes share a step.

Read `replicas.py`.
"""
