"""Programs of a Mamba's convolution and scan.

Legend: B packs per batch, S pack length, N heads, G groups, E inner width or channels of the convolution,
Z states of a channel.
"""

import functools

import numpy as np
from keras import ops

from benchmarks.training_steps import device_options
from bert_packed.architectures.mamba.operators import CHUNK_LENGTH, conv1d_pack, ssm_pack
from bert_packed.architectures.mamba2.config import Mamba2Config
from bert_packed.architectures.mamba2.state_space_duality import ssd_pack
from bert_packed.architectures.registry import MIXED
from bert_packed.parallel.targets import devices_here
from bert_packed.training.backend import compiled, gradient

PASSES = FORWARD, BOTH = "forward", "forward and backward"
OPERATORS = CONVOLUTION, SCAN = "convolution", "scan"


def operator_program(run, which):
    """Compile an operator, called with its inputs and positions, for one of `PASSES`.

    Returns:
        Function of its inputs, positions and weights `[B, S, E]` to the output, or for `BOTH` to the gradient
        of the weighted output by all inputs, and the output.
    """

    def forward(inputs, position_ids_BS, weights_BSE):
        del weights_BSE
        return (run(*inputs, position_ids_BS)[0],)

    def both(inputs, position_ids_BS, weights_BSE):
        # The gradient by the weights is the output; without it XLA would leave out what only that needs
        def weighted(given):
            return ops.sum(run(*given[0], position_ids_BS)[0] * given[1])

        return gradient(weighted)((inputs, weights_BSE))

    return compiled({FORWARD: forward, BOTH: both}[which])


def operator_inputs(operator, config, batches):
    """Random inputs of an operator for each batch: list of (inputs, positions, weights `[B, S, E]`)."""
    rng, make = np.random.default_rng(0), {CONVOLUTION: _convolution_inputs, SCAN: _scan_inputs}[operator]
    given = []
    for batch in batches:
        shape = batch["position_ids"].shape
        inputs = [ops.convert_to_tensor(one, "float32") for one in make(rng, config, shape)]
        # Values have the dtype of a run; a scan takes all else in float32
        inputs[0] = ops.cast(inputs[0], "bfloat16" if devices_here().dtype == MIXED else "float32")
        if operator == CONVOLUTION:
            inputs[1:] = [ops.cast(one, inputs[0].dtype) for one in inputs[1:]]
        width = config.conv_size if operator == CONVOLUTION else config.inner_size
        weights_BSE = ops.convert_to_tensor(rng.normal(size=(*shape, width)), "float32")
        given.append((inputs, ops.convert_to_tensor(batch["position_ids"]), weights_BSE))
    return given


def running(program, given):
    """A function of the repeat that calls a program for each of `operator_inputs`, and waits for results."""

    def run(_):
        for arguments in given:
            # A number waits for all of them; the whole would be copied from a device
            ops.convert_to_numpy(program(*arguments)[-1][0, 0, 0])

    return run


def device_operators(config):
    """The operators of a model on this process's devices: dict by `OPERATORS`."""
    given = device_options(config, CHUNK_LENGTH)  # whose kernels do not depend on the length
    scan = given.get("scan", ssm_pack)
    if isinstance(config, Mamba2Config):
        scan = given.get("duality", functools.partial(ssd_pack, chunk_length=config.chunk_size))
    return {CONVOLUTION: given.get("convolve", conv1d_pack), SCAN: scan}


def _convolution_inputs(rng, config, shape):
    width = config.conv_size
    return rng.normal(size=(*shape, width)), rng.normal(size=(config.conv_kernel, width)), np.zeros(width)


def _scan_inputs(rng, config, shape):
    inner, states = config.inner_size, config.state_size
    if isinstance(config, Mamba2Config):
        steps_BSN = rng.uniform(config.time_step_min, config.time_step_max, (*shape, config.num_heads))
        b_BSGZ, c_BSGZ = (rng.normal(size=(*shape, config.n_groups, states)) for _ in range(2))
        decays_N = -rng.uniform(1.0, 16.0, config.num_heads)
        return (
            rng.normal(size=(*shape, inner)),
            steps_BSN,
            decays_N,
            b_BSGZ,
            c_BSGZ,
            np.ones(config.num_heads),
        )
    steps_BSE = rng.uniform(config.time_step_min, config.time_step_max, (*shape, inner))
    decays_ZE = -np.repeat(np.arange(1.0, states + 1)[:, None], inner, axis=1)
    u_BSE, b_BSZ, c_BSZ = (rng.normal(size=(*shape, width)) for width in (inner, states, states))
    return u_BSE, steps_BSE, decays_ZE, b_BSZ, c_BSZ
