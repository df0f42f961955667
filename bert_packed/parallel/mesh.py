"""A mesh of devices, `[copies of the model, rows, columns]`, and arrays and variables spread over it.

A mesh of 2,2,2: two copies of the model, each on four devices.

    copy 0   0 1     copy 1   4 5
             2 3              6 7
"""

import math

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from bert_packed.core.settings import InputError
from bert_packed.parallel.replicas import AXIS
from bert_packed.parallel.summa import COLUMN, ROW

AXES = (AXIS, ROW, COLUMN)


def make_mesh(shape, devices):
    """`jax.sharding.Mesh` with `AXES` of the first devices; several processes must use all of them.

    Raises:
        InputError: there are too few, or too many, devices for the shape (copies, rows, columns).
    """
    number, processes = math.prod(shape), jax.process_count()
    asked = f"{'x'.join(map(str, shape))} = {number} devices, where there are {len(devices)}"
    if number > len(devices):
        raise InputError(
            f"`mesh` must not have more devices than there are. Received: {asked}. To try it on a CPU: "
            "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{-(-number // processes)}, or to compile only: --compile_only=FOLDER "
            f"--num_virtual_devices={number}."
        )
    if number < len(devices) and processes > 1:
        raise InputError(f"`mesh` must have all devices of all processes. Received: {asked}.")
    return jax.sharding.Mesh(np.array(devices[:number]).reshape(shape), AXES)


def on_blocks(function, mesh, in_specs, out_specs):
    """A function of one device's blocks as one of whole arrays: `jax.shard_map` over `ROW`, `COLUMN`."""
    # Inside a program over copies of the model, the mesh is that program's
    is_inside = not jax.sharding.get_abstract_mesh().empty
    return jax.shard_map(
        function,
        mesh=None if is_inside else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={ROW, COLUMN},
        check_vma=False,
    )


def differentiable(forward, backward, mesh, in_specs, out_specs):
    """`on_blocks` of a function with its gradient.

    Args:
        forward: Function of one device's blocks.
        backward: Function of these blocks and the gradient of the result, to their gradients; None for
            integers.
        in_specs, out_specs: `PartitionSpec`s, one for a whole list.
    """

    @jax.custom_vjp
    def function(*arguments):
        return on_blocks(forward, mesh, in_specs, out_specs)(*arguments)

    def differentiate(arguments, gradient):
        return on_blocks(backward, mesh, (*in_specs, out_specs), in_specs)(*arguments, gradient)

    function.defvjp(lambda *arguments: (function(*arguments), arguments), differentiate)
    return function


def spread(value, mesh, spec):
    """An array, whole in this process, on the devices of a mesh; one that is there already is returned."""
    sharding = NamedSharding(mesh, spec)
    lies = getattr(value, "sharding", None)
    if isinstance(value, jax.core.Tracer) or lies == sharding:
        return value
    if isinstance(lies, NamedSharding) and lies.is_equivalent_to(sharding, value.ndim):
        # The same sharding by another name would compile the program a second time
        shards = [shard.data for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])


class SpreadVariable:
    """A sharded Keras variable, to be read and assigned whole; `shape` is without padding, which stays 0."""

    def __init__(self, variable, mesh, spec, shape):
        self.path, self.dtype, self.shape = variable.path, variable.dtype, tuple(shape)
        self._variable, self._mesh, self._spec = variable, mesh, spec
        self._inside = tuple(slice(length) for length in self.shape)

    def numpy(self):
        """The array in the host's memory. A collective: all processes must call it."""
        value = self._variable.value
        is_here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
        whole = np.asarray(value) if is_here else multihost_utils.process_allgather(value, tiled=True)
        return whole[self._inside]

    def assign(self, values):
        whole = np.zeros(self._variable.shape, self.dtype)
        whole[self._inside] = values
        self._variable.assign(spread(whole, self._mesh, self._spec))


class FetchedVariable:
    """The array of a `SpreadVariable` in the host's memory, or with `keeps=False` only its collective."""

    def __init__(self, variable, keeps=True):
        values = variable.numpy()
        self._values = values if keeps else None

    def numpy(self):
        return self._values
