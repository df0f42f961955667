"""Data parallelism, layouts of a model over a mesh of devices, and the processes of a cluster.

`targets.py` has the devices that a step is compiled for, `replicas.py` those that share it. `layouts.py` has
Optimus and Megatron, which say how each weight is sharded and multiplied, on `mesh_layout.py` and `summa.py`.
`processes.py` is a run's view of its cluster; `cluster.py` finds the members and connects them.
"""
