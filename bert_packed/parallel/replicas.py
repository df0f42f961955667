"""Data parallelism: devices that share a step, by `tf.distribute` or `jax.sharding`.

Each of R replicas has a copy of the model and computes M / R packs of every micro-batch of M:

    packs of the step   0 1 2 3 | 4 5 6 7      M = 4, two micro-batches
    replica 0           0 1     | 4 5          R = 2
    replica 1               2 3 |     6 7
"""

import contextlib
import dataclasses
import functools
from typing import Any

import keras
import numpy as np

from bert_packed.core.settings import InputError

AXIS = "data"  # of JAX's mesh


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Devices that take a step together.

    Attributes:
        num: R, replicas of all processes.
        num_local: Replicas of this process.
        shares_processor: True where a process's devices are parts of one processor, as logical devices are.
        strategy: `tf.distribute.Strategy`, or None under JAX.
        mesh: `jax.sharding.Mesh` whose first axis is `AXIS`, or None under TensorFlow.
        layout: `mesh_layout.MeshLayout` of a sharded model; a replica is then the devices that compute the
            same packs.
    """

    num: int
    num_local: int
    shares_processor: bool = False
    strategy: Any = None
    mesh: Any = None
    layout: Any = None

    @property
    def num_whole(self):
        """Upper bound of the speed-up over one device."""
        num, num_here = self.num, self.num_local
        if self.mesh is not None:
            num, num_here = self.mesh.size, num_local(self.mesh)
        return num // num_here if self.shares_processor else num

    @property
    def num_copies(self):
        return self.mesh.shape[AXIS] if self.layout else self.num

    def scope(self):
        """Context manager in which model and optimizer must be made."""
        if self.layout:
            import jax

            # Weights are made in the host's memory: the whole model may not fit a device
            try:
                return jax.default_device(jax.local_devices(backend="cpu")[0])
            except RuntimeError as error:
                raise InputError(
                    "the environment variable JAX_PLATFORMS must have cpu in it for a layout, as cuda,cpu. "
                    f"Received: {jax.config.jax_platforms}."
                ) from error
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def by_replica(self, values, micro_batch_size):
        """Packs of this process, `[packs, ...]`, by replica: `[num_local, packs of a replica, ...]`.

        Four replicas that share 2 micro-batches of 4:

            [0 1 2 3 4 5 6 7]  ->  [[0 4] [1 5] [2 6] [3 7]]
        """
        parts = np.reshape(
            values, (-1, self.num_local, micro_batch_size // self.num_local, *values.shape[1:])
        )
        return np.swapaxes(parts, 0, 1).reshape(self.num_local, -1, *values.shape[1:])


def make_replicas(distribution, strategy=None, target=None):
    """`Replicas` of a run, or None for one device.

    Args:
        distribution: "none" for one device; "mirrored" for all of this process; "multi_worker" for all
            processes of a started cluster; "tpu" for all cores of a TPU.
        strategy: Strategy of the cluster, under TensorFlow; None makes it here.
        target: `Target` whose devices all share a step where they need not be here, under any distribution.

    Raises:
        InputError: there is no TPU.
    """
    if target and target.devices:
        if len(target.devices) == 1:
            return None
        if keras.backend.backend() != "jax":
            raise InputError(
                "`compile_for` must be one device unless KERAS_BACKEND=jax. Received: "
                f"{len(target.devices)} devices."
            )
        return _replicas_of(target.devices)
    if distribution == "none":
        return None
    if keras.backend.backend() == "jax":
        return _jax_replicas(distribution)
    return _tensorflow_replicas(distribution, strategy)


def count_replicas(layout, mesh_shape):
    """Number of parts into which a mesh (copies, rows, columns) divides packs."""
    # Each row of a copy of the model has other packs under optimus2d
    copies, rows, _ = mesh_shape
    return copies * rows if layout == "optimus2d" else copies


def check_processes(num_processes, num_replicas):
    """Raise `InputError` unless each process has whole replicas, or each replica whole processes."""
    if max(num_processes, num_replicas) % min(num_processes, num_replicas):
        raise InputError(
            "the number of processes must divide the parts that the mesh divides packs into, or they it. "
            f"Received: {num_processes} processes, {num_replicas} parts."
        )


def group_of(index, num_processes, num_replicas):
    """Number of a process's group, and of groups. The processes of a replica are a group, with the same
    packs:

        4 processes, 2 replicas   (0, 2) (0, 2) (1, 2) (1, 2)
        2 processes, 4 replicas   (0, 2) (1, 2)
    """
    size = max(num_processes // num_replicas, 1)
    return index // size, num_processes // size


def check_shares(replicas, **sizes):
    """Raise `InputError` if replicas do not divide a number of packs; sizes by name of the flag."""
    if replicas:
        received = f"{{value}} packs, {replicas.num} devices"
        check_divides(replicas.num, sizes, "the number of devices", received)


def check_divides(divisor, values, rule, received):
    """Raise `InputError` for the first of `values`, a dict, that a number does not divide.

    Args:
        divisor: Number of devices, or of what shares the values.
        values: Dict of int by name of the argument.
        rule: Phrase for the divisor.
        received: Template of the message's end, with `{name}` and `{value}`.
    """
    for name, value in values.items():
        if value % divisor:
            raise InputError(
                f"`{name}` must be divisible by {rule}. Received: {received.format(name=name, value=value)}."
            )


def _jax_replicas(distribution):
    import jax

    if distribution == "tpu" and jax.default_backend() != "tpu":
        raise InputError(
            f"`distribution` must not be tpu without a TPU. Received: devices of {jax.default_backend()}."
        )
    return _replicas_of(jax.local_devices() if distribution == "mirrored" else jax.devices())


def _replicas_of(devices):
    import jax

    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    return Replicas(len(devices), num_local(mesh), devices[0].platform == "cpu", mesh=mesh)


def num_processes(mesh):
    """Number of processes that have the devices of a mesh, as many each."""
    return len({device.process_index for device in mesh.devices.flat})


def num_local(mesh):
    """Number of a mesh's devices in each process."""
    return mesh.size // num_processes(mesh)


@functools.cache  # the collectives of a second strategy would get the numbers of the first one's
def _tensorflow_replicas(distribution, strategy):
    import tensorflow as tf

    if distribution == "mirrored":
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    elif distribution == "multi_worker":
        strategy = strategy or tf.distribute.MultiWorkerMirroredStrategy()
    else:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
        except (ValueError, tf.errors.OpError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"`distribution` must not be tpu without a TPU. Received: {reason}") from error
        strategy = tf.distribute.TPUStrategy(resolver)
    num = strategy.num_replicas_in_sync
    devices = strategy.extended.worker_devices
    return Replicas(num, len(devices), "CPU" in devices[0], strategy=strategy)
