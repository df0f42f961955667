"""Data parallelism, layouts of a model over a mesh of devices, and the processes of a cluster.

`targets.py` has the devices that a step is compiled for, `replicas.py` those that share it. `layouts.py`
makes a layout: `optimus.py` or `megatron.py` say how each weight is sharded and multiplied, on
`mesh_layout.py` and `summa.py`. `cluster.py` finds the members of a cluster, `processes.py` is a run's view
of it.
"""
