"""Operators of packs compiled forward and backward for one device that is not here. Needs JAX."""

import functools

import jax

from bert_packed.parallel.targets import absent_target

KERNEL = 'custom_call_target="tpu_custom_call"'
target_of = functools.cache(lambda kind: absent_target(f"{kind}:1"))


def compile_operator(kind, operator, inputs, data, outputs, **options):
    """Compile `operator(*inputs, *data)`, a pair of outputs and what is carried on, and its gradient.

    Inputs, data and outputs are (dtype, *shape); of data also None. `options` are the compiler's.
    """
    target = target_of(kind)
    (device,) = target.devices
    sharding = jax.sharding.SingleDeviceSharding(device)

    def forward_and_backward(inputs, data, weights):
        outputs, pull_back, carried = jax.vjp(lambda *given: operator(*given, *data), *inputs, has_aux=True)
        return outputs, carried, pull_back(weights)

    def abstract(arrays):
        return [one and jax.ShapeDtypeStruct(one[1:], one[0], sharding=sharding) for one in arrays]

    arguments = abstract(inputs), abstract(data), *abstract([outputs])
    with jax.default_device(device):
        return jax.jit(forward_and_backward).lower(*arguments).compile({**target.compiler_options, **options})
