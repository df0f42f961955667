"""Calls of Pallas kernels on TPUs, with the memory and the work that compilers are told; sizes of blocks."""

import math

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BASE_MEMORY = 16 * 2**20  # bytes that a kernel has by default


def call(kernel, name, grid, inputs, outputs, scratch=(), flops=0, transcendentals=0):
    """Run a kernel over a grid whose last dimension goes in order, and the others in any.

    `inputs` and `outputs` pair an array, or its `jax.ShapeDtypeStruct`, and the `BlockSpec` of a step,
    or of trees of them. `scratch` has shapes of float32 arrays on the chip; `flops` counts matrix products.
    """
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    specs = jax.tree.leaves((in_specs, out_specs), is_leaf=lambda one: isinstance(one, pl.BlockSpec))
    of_arrays = jax.tree.leaves((arrays, shapes))
    of_blocks = sum(
        math.prod(size or 1 for size in spec.block_shape) * of.dtype.itemsize
        for spec, of in zip(specs, of_arrays, strict=True)
    )
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(of.shape, of.dtype) for of in shapes],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - 1) + ("arbitrary",),
            # While a step computes on its blocks, those of the next one are read
            vmem_limit_bytes=BASE_MEMORY + 2 * of_blocks + 4 * sum(map(math.prod, scratch)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=transcendentals,
            bytes_accessed=sum(of.size * of.dtype.itemsize for of in of_arrays),
        ),
    )(*arrays)


def block_sizes(number, most):
    """Number and size of blocks of at most `most`, with few or none left over.

    40 in at most 6   ->   8 of 5
    13 in at most 6   ->   3 of 5: 1 does divide 13, but is too small
    """
    size = max(size for size in range(1, most + 1) if number % size == 0)
    if 2 * size < min(most, number):
        size = -(-number // -(-number // most))
    return -(-number // size), size
