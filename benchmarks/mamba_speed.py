"""What training a Mamba costs in each way to bring sequences into a batch: whole steps, and their memory."""

import statistics

from benchmarks.benchmark_engine import RECIPE
from benchmarks.sequence_batches import PACKED, PADDED, SINGLE, make_batches
from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.runs.interleaved_timing import median_interval, median_ratio, ratios, time_interleaved
from bert_packed.training.engines import make_engine
from bert_packed.training.optimization import build_optimizer

REFERENCE = "transformers"
# What is asked of packs, in real tokens/s: against one sequence at a time (the paper's gain for its model of
# 1.4B), against padded rows (of what the padding promises), and against transformers
SINGLE_GAIN, PADDED_SHARE, REFERENCE_GAIN = 3.06, 0.95, 3.0
KIBIBYTE, MEBIBYTE = 2**10, 2**20


def make_mamba_engine(model_config, weighting="per_token"):
    """An engine of the running backend with fresh weights, next-token loss and LAMB of the default recipe."""
    objective = next_token_objective(weighting)
    model = objective.build_model(model_config, seed=0)
    return make_engine(model, objective, build_optimizer(RECIPE))


def training_ways(model_config, batches):
    """Functions that train once on all sequences, each in its way: as `turns.time_interleaved` wants them.

    One optimizer step a batch: who trains on one sequence at a time updates for each.

    Args:
        model_config: `MambaConfig`.
        batches: Dict from way to `sequence_batches.Batches`.

    Returns:
        Dict of `batches`' ways.
    """
    engine = make_mamba_engine(model_config)
    return {way: training(engine, some.batches) for way, some in batches.items()}


def training(engine, batches):
    """A function that trains once on each batch and returns when that is done."""

    def train(_):
        for batch in batches:
            float(engine.train_step(batch)["num_sequences"])  # wait for the device

    return train


def measure_training(model_config, batches, num_repeats):
    """Time training on all sequences in each way, in turns.

    Args:
        model_config: `MambaConfig`.
        batches: Dict from `make_batches`.
        num_repeats: Turns.

    Returns:
        Rows as of `speeds` with `padding, %`, and rows as of `comparison` with all ways but the packs.
    """
    seconds = time_interleaved(training_ways(model_config, batches), num_repeats)
    num_tokens = {way: some.num_tokens for way, some in batches.items()}
    rows = speeds(seconds, num_tokens)
    for row in rows:
        row["padding, %"] = 100 * batches[row["way"]].padding
    padding = (1 - batches[PACKED].padding) / (1 - batches[PADDED].padding)
    by_token = seconds_a_token(seconds, num_tokens)
    asked = {SINGLE: SINGLE_GAIN, PADDED: PADDED_SHARE * padding}
    return rows, [comparison(by_token, way, least) for way, least in asked.items()]


def measure_reference(model_config, batches, num_rows, num_repeats):
    """Time training with transformers on the first padded rows, in turns with training on all packs.

    Args:
        model_config, batches, num_repeats: As of `measure_training`.
        num_rows: Rows of a step of transformers.

    Returns:
        A row that says which path transformers took and how fast, and one as of `comparison`.
    """
    from benchmarks.mamba_reference import causal_training

    rows = {name: values[:num_rows] for name, values in batches[PADDED].batches[0].items()}
    with causal_training(rows, model_config) as found:
        ours = training(make_mamba_engine(model_config), batches[PACKED].batches)
        seconds = time_interleaved({PACKED: ours, REFERENCE: found.train}, num_repeats)
    num_tokens = {PACKED: batches[PACKED].num_tokens, REFERENCE: found.num_tokens}
    by_token = seconds_a_token(seconds, num_tokens)
    speed = {
        "rows": num_rows,
        "padding, %": 100 * found.padding,
        "s": statistics.median(seconds[REFERENCE]),
        "real tokens/s": 1 / statistics.median(by_token[REFERENCE]),
    }
    return {**found.path, **speed}, comparison(by_token, REFERENCE, REFERENCE_GAIN)


def comparison(by_token, way, asked):
    """How many times the tokens/s of a way the packs have: a dict.

    Args:
        by_token: From `seconds_a_token`.
        way: Compared with.
        asked: At least.

    Returns:
        `packed against`, `times the tokens/s`, the median over turns, `from` and `to`, between which that
        lies with a confidence of 95 %, and `asked`.
    """
    gains = ratios(by_token[way], by_token[PACKED])
    low, high = median_interval(gains)
    gain = statistics.median(gains)
    return {"packed against": way, "times the tokens/s": gain, "from": low, "to": high, "asked": asked}


def seconds_a_token(seconds, num_tokens):
    """Times of some ways as of `time_interleaved`, each over the real tokens of a turn of this way."""
    return {way: [time / num_tokens[way] for time in times] for way, times in seconds.items()}


def speeds(seconds, num_tokens):
    """Times of some ways as rows of a table.

    Args:
        seconds: From `time_interleaved`; `SINGLE` among them.
        num_tokens: Dict from way to the real tokens of a turn.

    Returns:
        List of dicts: `way`, `s`, the median, `real tokens/s`, and `gain`, by token the time one at a time
        over this way's, the median over turns.
    """
    by_token = seconds_a_token(seconds, num_tokens)
    return [
        {
            "way": way,
            "s": statistics.median(seconds[way]),
            "real tokens/s": 1 / statistics.median(times),
            "gain": median_ratio(by_token[SINGLE], times),
        }
        for way, times in by_token.items()
    ]


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
