"""Which devices and processes share a step, how a model lies on them, and how the processes agree and end.

Read `replicas.py` for the devices; of a model that is spread over them `optimus.py` or `megatron.py`, which
say how each weight lies and which product it uses (`summa.py`, by `mesh_layout.py` and `mesh.py`), and
`layouts.py`, which chooses; `processes.py` for what a run asks of its cluster, `cluster.py` for how it
is described and meets, `services.py` for what each backend does for it.
"""
