"""Which devices stand where on a mesh of `[copies of the model, rows, columns]`, and what lies on them.

A mesh of 2,2,2: two copies of the model, each on four devices.

    copy 0   0 1     copy 1   4 5
             2 3              6 7
"""

import math

import jax
import numpy as np
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


def lay(value, mesh, spec):
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
        # In other words, for which a program would be compiled anew
        shards = [shard.data for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])
