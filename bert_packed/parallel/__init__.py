"""Which devices and processes share a step, and how the processes agree and end.

Read `replicas.py` for the devices; `processes.py` for what a run asks of its cluster, `cluster.py` for how it
is described and started, then a backend's own service: `jax_service.py` or `tensorflow_service.py`.
"""
