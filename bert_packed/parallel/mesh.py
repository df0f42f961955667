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
    """A mesh of the first devices: `jax.sharding.Mesh` with `AXES`.

    Args:
        shape: (copies, rows, columns).
        devices: Those that there are; of several processes all, which the mesh must fill.

    Raises:
        InputError: they are too few.
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
    """A function of the blocks of each device, as one of whole arrays.

    Args:
        function: Computes one device's block of the results; may use collectives along `ROW` and `COLUMN`.
        mesh: Where no mesh is set yet.
        in_specs, out_specs: As of `jax.shard_map`, without copies of the model.
    """
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
    """A function of the blocks of each device, with its gradient, as one of whole arrays.

    Args:
        forward: As `function` of `on_blocks`.
        backward: Function of the arguments of `forward` and the gradient of what it returns, to the gradients
            of these arguments; None of whole numbers.
        mesh, in_specs, out_specs: As of `on_blocks`; one that stands for a list holds for all that is in it.
    """

    @jax.custom_vjp
    def function(*arguments):
        return on_blocks(forward, mesh, in_specs, out_specs)(*arguments)

    def differentiate(arguments, gradient):
        return on_blocks(backward, mesh, (*in_specs, out_specs), in_specs)(*arguments, gradient)

    function.defvjp(lambda *arguments: (function(*arguments), arguments), differentiate)
    return function


def spread(value, mesh, spec):
    """An array on the devices of a mesh.

    Args:
        value: Any array, whole in this process; or one that lies so already.
        mesh: `jax.sharding.Mesh`.
        spec: `PartitionSpec`.
    """
    sharding = NamedSharding(mesh, spec)
    lies = getattr(value, "sharding", None)
    if isinstance(value, jax.core.Tracer) or lies == sharding:
        return value
    if isinstance(lies, NamedSharding) and lies.is_equivalent_to(sharding, value.ndim):
        # The same layout by another name, for which a program would be compiled again
        shards = [shard.data for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])


class SpreadVariable:
    """A Keras variable whose array lies on the devices of a mesh, to be read and assigned whole.

    Args:
        variable: The Keras variable.
        mesh, spec: As of `spread`.
        shape: Without the rows or columns that a layout adds, which stay 0.
    """

    def __init__(self, variable, mesh, spec, shape):
        self.path, self.dtype, self.shape = variable.path, variable.dtype, tuple(shape)
        self._variable, self._mesh, self._spec = variable, mesh, spec
        self._inside = tuple(slice(length) for length in self.shape)

    def numpy(self):
        """The array in the host's memory; where it lies in several processes, all must ask together."""
        value = self._variable.value
        is_here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
        whole = np.asarray(value) if is_here else multihost_utils.process_allgather(value, tiled=True)
        return whole[self._inside]

    def assign(self, values):
        """Put an array of `shape` in its place."""
        whole = np.zeros(self._variable.shape, self.dtype)
        whole[self._inside] = values
        self._variable.assign(spread(whole, self._mesh, self._spec))


class FetchedVariable:
    """The array of a `SpreadVariable` in the host's memory.

    Args:
        variable: It; all processes ask together.
        keeps: Whether it is going to be read; if not, this process only helps others to get it.
    """

    def __init__(self, variable, keeps=True):
        values = variable.numpy()
        self._values = values if keeps else None

    def numpy(self):
        return self._values
