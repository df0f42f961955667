"""Construction of a run's layout, by the value of `--layout`."""

import jax

from bert_packed.parallel.megatron import Megatron1D
from bert_packed.parallel.mesh_layout import make_mesh
from bert_packed.parallel.optimus import Optimus2D
from bert_packed.parallel.replicas import Replicas, check_processes, count_replicas, num_processes


def make_layout_replicas(layout, mesh_shape, transport="gather", distribution="none", target=None):
    """`Replicas` of "optimus2d" or "megatron1d" on a mesh (copies of the model, rows, columns).

    Args:
        transport: Of `Optimus2D`.
        distribution: "none" for devices of this process, "multi_worker" for those of all processes.
        target: `Target` whose devices it is where they need not be here.

    Raises:
        InputError: the devices do not make the mesh.
    """
    devices = target and target.devices
    if not devices:
        devices = jax.devices() if distribution == "multi_worker" else jax.local_devices()
    # A process has consecutive devices, so that its packs follow from its number alone, `group_of`
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    mesh = make_mesh(mesh_shape, devices)
    num = count_replicas(layout, mesh_shape)
    check_processes(num_processes(mesh), num)
    chosen = Optimus2D(mesh, transport) if layout == "optimus2d" else Megatron1D(mesh)
    return Replicas(
        num,
        max(num // num_processes(mesh), 1),
        devices[0].platform == "cpu",
        mesh=mesh,
        layout=chosen,
    )
