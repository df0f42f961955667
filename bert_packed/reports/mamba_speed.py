"""What a Mamba's training costs in each way to bring sequences into a batch: whole steps, operators, memory.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel, W taps of the convolution.
"""

import dataclasses
import statistics

import numpy as np
from keras import ops

from bert_packed.models.causal_convolution import conv1d_pack
from bert_packed.models.selective_scan import ssm_pack
from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.reports.benchmark_engine import RECIPE
from bert_packed.reports.sequence_batches import PACKED, PADDED, SINGLE, make_batches
from bert_packed.runs.turns import median_interval, median_ratio, ratios, time_in_turns
from bert_packed.training.engines import make_engine
from bert_packed.training.engines.functional import compiled, gradient
from bert_packed.training.optimization import build_optimizer

NO_RESETS, REFERENCE = "packed, without resets", "transformers"
# What is asked of packs, in real tokens/s: against one sequence at a time (the paper's gain for its model of
# 1.4B), against padded rows (of what the padding promises), and against transformers
SINGLE_GAIN, PADDED_SHARE, REFERENCE_GAIN = 3.06, 0.95, 3.0
RESETS_COST = 0.02  # of a step, at most
KIBIBYTE, MEBIBYTE = 2**10, 2**20


def make_mamba_engine(model_config, weighting="per_token"):
    """An engine of the running backend with fresh weights, next-token loss and LAMB of the default recipe."""
    objective = next_token_objective(weighting)
    model = objective.build_model(model_config, seed=0)
    return make_engine(model, objective, build_optimizer(RECIPE))


def training_ways(model_config, batches):
    """Functions that train once on all sequences, each in its way: as `turns.time_in_turns` wants them.

    One optimizer step a batch: who trains on one sequence at a time updates for each.

    Args:
        model_config: `MambaConfig`.
        batches: Dict from way to `sequence_batches.Batches`.

    Returns:
        Dict of `batches`' ways and `NO_RESETS`: the packs, by a model whose states go on through them.
        That one compares positions too, and finds fewer starts: no cost of the comparing itself is seen.
    """
    engine = make_mamba_engine(model_config)
    without = make_mamba_engine(dataclasses.replace(model_config, ablation_no_position_reset=True))
    ways = {way: _training(engine, some.batches) for way, some in batches.items()}
    return {**ways, NO_RESETS: _training(without, batches[PACKED].batches)}


def _training(engine, batches):
    def train(_):
        for batch in batches:
            float(engine.train_step(batch)["num_sequences"])  # wait for the device

    return train


def operator_ways(model_config, batches, seed=0):
    """Functions that run an operator forward and backward on the shapes of all sequences.

    Args:
        model_config: `MambaConfig`.
        batches: As in `training_ways`.
        seed: Of the inputs, which are random.

    Returns:
        Dict from operator, "convolution" and "scan", to a dict from way to function.
    """
    return {
        name: {way: _runs(program, inputs, some.batches, seed) for way, some in batches.items()}
        for name, (program, inputs) in _operators(model_config).items()
    }


def _operators(config):
    """The compiled gradient of each operator, and its inputs for a shape `[B, S]`."""
    inner, states = config.inner_size, config.state_size

    def convolve(given, position_ids_BS, weights_BSE):
        x_BSE, kernel_WE, bias_E = given
        return ops.sum(conv1d_pack(x_BSE, kernel_WE, bias_E, position_ids_BS)[0] * weights_BSE)

    def scan(given, position_ids_BS, weights_BSE):
        return ops.sum(ssm_pack(*given, position_ids_BS)[0] * weights_BSE)

    def inputs_of_convolution(rng, shape):
        return rng.normal(size=(*shape, inner)), rng.normal(size=(config.conv_kernel, inner)), np.zeros(inner)

    def inputs_of_scan(rng, shape):
        steps_BSE = rng.uniform(config.time_step_min, config.time_step_max, (*shape, inner))
        decays_ZE = -np.repeat(np.arange(1.0, states + 1)[:, None], inner, axis=1)
        u_BSE, b_BSZ, c_BSZ = (rng.normal(size=(*shape, width)) for width in (inner, states, states))
        return u_BSE, steps_BSE, decays_ZE, b_BSZ, c_BSZ

    def differentiated(operator):
        def both(given, position_ids_BS, weights_BSE):
            # Weighted, so that no gradient is the same everywhere
            return gradient(lambda given: operator(given, position_ids_BS, weights_BSE))(given)

        return compiled(both)

    return {
        "convolution": (differentiated(convolve), inputs_of_convolution),
        "scan": (differentiated(scan), inputs_of_scan),
    }


def _runs(program, make_inputs, batches, seed):
    """A function that calls a program for each batch and returns when all is computed."""
    rng = np.random.default_rng(seed)
    calls = []
    for batch in batches:
        positions_BS = batch["position_ids"]
        given = [ops.convert_to_tensor(x, "float32") for x in make_inputs(rng, positions_BS.shape)]
        weights_BSE = ops.convert_to_tensor(rng.normal(size=given[0].shape), "float32")
        calls.append((given, ops.convert_to_tensor(positions_BS), weights_BSE))

    def run(_):
        for arguments in calls:
            ops.convert_to_numpy(program(*arguments)[-1])

    return run


def measure_training(model_config, batches, num_repeats, reference=False):
    """Time training on all sequences in each way, in turns.

    Args:
        model_config: `MambaConfig`.
        batches: Dict from `make_batches`.
        num_repeats: Turns.
        reference: Whether transformers takes its turns too, on the padded rows.

    Returns:
        Rows as of `speeds`, and a list of dicts that compare the packs with every other way:
        `packed against`, `times the tokens/s`, the median over turns, `from`, `to`, between which that lies
        with a confidence of 95 %, and `asked`, at least.
    """
    ways = training_ways(model_config, batches)
    padded = {**batches, NO_RESETS: batches[PACKED]}
    if reference:
        from bert_packed.reports.mamba_reference import causal_training

        padded[REFERENCE], ways[REFERENCE] = causal_training(batches[PADDED].batches, model_config)
    seconds = time_in_turns(ways, num_repeats)
    num_tokens = batches[PACKED].num_tokens
    rows = speeds(seconds, num_tokens)
    for row in rows:
        row["padding, %"] = 100 * padded[row["way"]].padding
    asked = {
        SINGLE: SINGLE_GAIN,
        PADDED: PADDED_SHARE * (1 - batches[PACKED].padding) / (1 - batches[PADDED].padding),
        NO_RESETS: 1 / (1 + RESETS_COST),
        REFERENCE: REFERENCE_GAIN,
    }
    comparisons = []
    for way in [way for way in seconds if way != PACKED]:
        gains = ratios(seconds[way], seconds[PACKED])
        low, high = median_interval(gains)
        comparisons.append(
            {
                "packed against": way,
                "times the tokens/s": statistics.median(gains),
                "from": low,
                "to": high,
                "asked": asked[way],
            }
        )
    return rows, comparisons


def speeds(seconds, num_tokens):
    """Times of some ways as rows of a table.

    Args:
        seconds: From `time_in_turns`; `SINGLE` among them.
        num_tokens: Real tokens of a turn, the same in each way.

    Returns:
        List of dicts: `way`, `s`, the median, `real tokens/s`, and `gain`, the time one at a time over this
        way's, the median over turns.
    """
    rows = []
    for way, times in seconds.items():
        median = statistics.median(times)
        gain = median_ratio(seconds[SINGLE], times)
        rows.append({"way": way, "s": median, "real tokens/s": num_tokens / median, "gain": gain})
    return rows


def measure_operators(model_config, batches, num_repeats):
    """Time each operator on the shapes of all sequences, in turns: rows as of `speeds`, with `operator`."""
    rows = []
    for name, ways in operator_ways(model_config, batches).items():
        seconds = time_in_turns(ways, num_repeats)
        rows += [{"operator": name, **row} for row in speeds(seconds, batches[PACKED].num_tokens)]
    return rows


def step_memory(model_config, pack_lengths):
    """What a compiled training step on one pack holds besides weights and optimizer, by XLA's count.

    Args:
        model_config: `MambaConfig`.
        pack_lengths: Values of S.

    Returns:
        List of dicts: `tokens`, `temporaries, MiB`, `KiB a token`; None where the backend does not tell.
    """
    rows = []
    for length in pack_lengths:
        engine = make_mamba_engine(model_config)
        packs = make_batches([(length,)], length, length, 1, 1, model_config.vocab_size)
        (program,) = engine.step_programs(packs[PACKED].batches[0])
        size = program.temporary_bytes
        rows.append(
            {
                "tokens": length,
                "temporaries, MiB": size and size / MEBIBYTE,
                "KiB a token": size and size / KIBIBYTE / length,
            }
        )
    return rows
