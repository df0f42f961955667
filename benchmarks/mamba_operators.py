"""What a Mamba's convolution and scan cost in each way to bring sequences into a batch, and other scans.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel, W taps of the convolution.
"""

import statistics

import numpy as np
from keras import ops

from benchmarks.mamba_speed import speeds
from benchmarks.scan_variants import scan_variants
from bert_packed.models.causal_convolution import conv1d_pack
from bert_packed.models.selective_scan import ssm_pack
from bert_packed.runs.interleaved_timing import median_interval, ratios, time_interleaved
from bert_packed.training.engines.functional import compiled, gradient

PASSES = FORWARD, BOTH = "forward", "forward and backward"
CONVOLUTION, SCAN = "convolution", "scan"
MICRO = 1e6


def measure_operators(model_config, batches, num_repeats):
    """Time each operator on the shapes of all sequences, in turns.

    Args:
        model_config: `MambaConfig`.
        batches: Dict from `make_batches`.
        num_repeats: Turns.

    Returns:
        Rows as of `mamba_speed.speeds`, with `operator` and `pass`.
    """
    num_tokens = {way: some.num_tokens for way, some in batches.items()}
    rows = []
    for operator in (CONVOLUTION, SCAN):
        for which in PASSES:
            program = operator_program(operator, which)
            ways = {
                way: runs(program, *operator_inputs(operator, model_config, some.batches))
                for way, some in batches.items()
            }
            seconds = time_interleaved(ways, num_repeats)
            rows += [{"operator": operator, "pass": which, **row} for row in speeds(seconds, num_tokens)]
    return rows


def measure_variants(model_config, batches, num_repeats):
    """Time other ways to compute the scan, beside the chosen one, on packs.

    Args:
        model_config: `MambaConfig`.
        batches: List of batch dicts of packs.
        num_repeats: Turns.

    Returns:
        List of dicts: `scan`, the median microseconds a token of `PASSES`, and with a confidence of 95 % how
        many `times as long` the latter takes as the chosen one, `from`, `to`.
    """
    given, positions = operator_inputs(SCAN, model_config, batches)
    num_tokens = sum(batch["position_ids"].size for batch in batches)
    ways = {
        (name, which): runs(operator_program(SCAN, which, variant), given, positions)
        for name, variant in scan_variants().items()
        for which in PASSES
    }
    seconds = time_interleaved(ways, num_repeats)
    rows = []
    for name in scan_variants():
        found = ratios(seconds[name, BOTH], seconds[next(iter(ways))[0], BOTH])
        low, high = median_interval(found)
        microseconds = {
            f"{which}, us a token": MICRO * statistics.median(seconds[name, which]) / num_tokens
            for which in PASSES
        }
        longer = {"times as long": statistics.median(found), "from": low, "to": high}
        rows.append({"scan": name, **microseconds, **longer})
    return rows


def operator_program(operator, which, scan=ssm_pack):
    """An operator, compiled.

    Args:
        operator: `CONVOLUTION` or `SCAN`.
        which: `FORWARD` or `BOTH`.
        scan: What computes the scan.

    Returns:
        Function of its inputs, positions and weights `[B, S, E]` to the output, or for `BOTH` to the gradient
        of the weighted output by all inputs, and the output.
    """
    run = {CONVOLUTION: conv1d_pack, SCAN: scan}[operator]

    def forward(inputs, position_ids_BS, weights_BSE):
        del weights_BSE
        return (run(*inputs, position_ids_BS)[0],)

    def both(inputs, position_ids_BS, weights_BSE):
        # By the weights the gradient is the output; without it XLA would leave out what only that needs
        def weighted(given):
            return ops.sum(run(*given[0], position_ids_BS)[0] * given[1])

        return gradient(weighted)((inputs, weights_BSE))

    return compiled({FORWARD: forward, BOTH: both}[which])


def operator_inputs(operator, config, batches, seed=0):
    """Random inputs of an operator for each of some batches.

    Args:
        operator: `CONVOLUTION` or `SCAN`.
        config: `MambaConfig`.
        batches: List of batch dicts.
        seed: Whole number.

    Returns:
        List of tuples of (list of inputs, weights float32 `[B, S, E]`), and of the positions of each batch.
    """
    rng = np.random.default_rng(seed)
    make = {CONVOLUTION: _convolution_inputs, SCAN: _scan_inputs}[operator]
    drawn = []
    for batch in batches:
        shape = batch["position_ids"].shape
        inputs = [ops.convert_to_tensor(one, "float32") for one in make(rng, config, shape)]
        drawn.append((inputs, ops.convert_to_tensor(rng.normal(size=(*shape, config.inner_size)), "float32")))
    return drawn, [ops.convert_to_tensor(batch["position_ids"]) for batch in batches]


def _convolution_inputs(rng, config, shape):
    inner = config.inner_size
    return rng.normal(size=(*shape, inner)), rng.normal(size=(config.conv_kernel, inner)), np.zeros(inner)


def _scan_inputs(rng, config, shape):
    inner, states = config.inner_size, config.state_size
    steps_BSE = rng.uniform(config.time_step_min, config.time_step_max, (*shape, inner))
    decays_ZE = -np.repeat(np.arange(1.0, states + 1)[:, None], inner, axis=1)
    u_BSE, b_BSZ, c_BSZ = (rng.normal(size=(*shape, width)) for width in (inner, states, states))
    return u_BSE, steps_BSE, decays_ZE, b_BSZ, c_BSZ


def runs(program, drawn, positions):
    """A function that calls a program for each batch and returns when all is computed.

    Args:
        program: From `operator_program`.
        drawn, positions: From `operator_inputs`; a position may be None.
    """

    def run(_):
        for (inputs, weights_BSE), position_ids_BS in zip(drawn, positions, strict=True):
            ops.convert_to_numpy(program(inputs, position_ids_BS, weights_BSE)[-1])

    return run
