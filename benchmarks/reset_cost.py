"""What it costs a Mamba to start anew with every sequence, beside programs that have no starts in them."""

import dataclasses
import statistics

from benchmarks.mamba_operators import (
    BOTH,
    CONVOLUTION,
    SCAN,
    operator_inputs,
    operator_program,
    runs,
)
from benchmarks.mamba_speed import make_mamba_engine, training
from bert_packed.runs.interleaved_timing import median_interval, ratios, time_interleaved

WITH, WITHOUT = "with", "without"
MOST = 2.0  # percent of a step, asked


def reset_ways(model_config, batches):
    """Functions that compute the same packs with and without resets.

    Args:
        model_config: `MambaConfig`.
        batches: List of batch dicts of packs.

    Returns:
        Dict from `step` and each operator, forward and backward, to a dict from `WITH` and `WITHOUT` to a
        function as `turns.time_interleaved` wants it.
    """
    endless = dataclasses.replace(model_config, ablation_no_position_reset=True)
    configs = {WITH: model_config, WITHOUT: endless}
    ways = {"step": {way: training(make_mamba_engine(one), batches) for way, one in configs.items()}}
    for operator in (CONVOLUTION, SCAN):
        program = operator_program(operator, BOTH)
        drawn, positions = operator_inputs(operator, model_config, batches)
        ways[operator] = {
            WITH: runs(program, drawn, positions),
            WITHOUT: runs(program, drawn, [None] * len(positions)),
        }
    return ways


def measure_resets(model_config, batches, num_repeats):
    """Time packs with and without resets, in alternating turns.

    Args:
        model_config, batches: As of `reset_ways`.
        num_repeats: Turns of each.

    Returns:
        List of dicts: `of`, median seconds `with, s` and `without, s`, what the resets add in percent:
        `cost, %`, the median of neighbouring turns, `from` and `to`, between which it lies with a confidence
        of 95 %; and `asked`, at most.
    """
    rows = []
    for name, ways in reset_ways(model_config, batches).items():
        seconds = time_interleaved(ways, num_repeats)
        added = [100 * (ratio - 1) for ratio in ratios(seconds[WITH], seconds[WITHOUT])]
        low, high = median_interval(added)
        medians = {f"{way}, s": statistics.median(times) for way, times in seconds.items()}
        cost = {"cost, %": statistics.median(added), "from": low, "to": high}
        rows.append({"of": name, **medians, **cost, "asked": MOST if name == "step" else None})
    return rows
