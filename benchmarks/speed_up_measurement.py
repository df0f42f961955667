"""What the report on the speed of packed training times, and what it makes of the times.

Legend: B packs or rows per batch, S their length.
"""

import contextlib
import dataclasses
import functools
import statistics

import numpy as np

from benchmarks import training_ways
from benchmarks.random_batches import (
    check_positions,
    count_predictions,
    draw_lengths,
    draw_packs,
    random_batch,
    spec_of_plan,
    spec_of_rows,
)
from bert_packed.assembly.length_plan import plan_lengths
from bert_packed.models.flops import bert_flops
from bert_packed.packing.histogram import fold
from bert_packed.packing.plan import from_json
from bert_packed.records.read_lengths import read_histogram
from bert_packed.runs.interleaved_timing import median_interval, ratios

NUM_BATCHES = 2  # of each way, in turn
PLAIN_PACKS, PLAIN, PACKED, UNPACKED = "plain, packs", "plain", "packed", "unpacked"
PADDED, SORTED = "transformers, padded", "transformers, sorted"
KERAS_HUB = "keras-hub, padded"


@dataclasses.dataclass(frozen=True)
class Data:
    """The sequences of a data set, planned as a whole, and some batches of them.

    Attributes:
        histogram: int64 `[S]`.
        plan: `PackingPlan` for it.
        packed, unpacked: Lists of batch dicts of B packs, and of B rows of one sequence.
        by_length: List of batch dicts of B sequences of like length, in rows as long as the longest: all
            lengths of the data, as often as they are there.
    """

    histogram: np.ndarray
    plan: object
    packed: list[dict]
    unpacked: list[dict]
    by_length: list[dict]

    def describe(self):
        """The data as a whole: a row of a table."""
        plan = self.plan
        return {
            "sequences": plan.num_sequences,
            "packs": plan.num_packs,
            "depth": plan.depth,
            "efficiency, %": 100 * plan.efficiency,
            "packing factor": plan.packing_factor,
        }

    def sums(self, is_packed):
        """Means over all the data of what a row holds, for `bert_flops`: dict of floats."""
        lengths = np.arange(1, len(self.histogram) + 1)
        values = {
            "num_tokens": lengths,
            "num_pairs": lengths**2,
            "num_predictions": count_predictions(lengths, len(lengths)),
            "num_sequences": np.ones(len(lengths)),
        }
        rows = self.plan.num_packs if is_packed else self.plan.num_sequences
        return {name: float(of_length @ self.histogram) / rows for name, of_length in values.items()}


def make_data(config, model_config):
    """Plan the data, and make batches of them: `Data`.

    Args:
        config: `speed_up.SpeedUpConfig`.
        model_config: `ModelConfig`.

    Raises:
        InputError: no histogram, or the algorithm cannot pack it, or the model has too few positions.
    """
    length, size = config.max_seq_length, config.batch_size
    check_positions(length, model_config)
    histogram = fold(read_histogram(config.histogram_name, config.input_file), length)
    depth = config.max_sequences_per_pack
    plan = from_json(plan_lengths(histogram, config.algorithm, length, depth)["plan"])
    rng = np.random.default_rng(config.random_seed)
    make = functools.partial(random_batch, limit=length, vocab_size=model_config.vocab_size, rng=rng)
    spec = spec_of_plan(plan)
    row = spec_of_rows(length, length)
    return Data(
        histogram=histogram,
        plan=plan,
        packed=[make(draw_packs(plan, size, rng), spec) for _ in range(NUM_BATCHES)],
        unpacked=[
            make([(one,) for one in draw_lengths(histogram, size, rng)], row) for _ in range(NUM_BATCHES)
        ],
        by_length=[
            make([(one,) for one in lengths], spec_of_rows(max(lengths), length))
            for lengths in (sorted_lengths(histogram, size, config.repeats, rng) if config.reference else ())
        ],
    )


def sorted_lengths(histogram, batch_size, num_batches, rng):
    """Lengths of batches that a sorted data set is cut into, in random order: int64 `[num_batches, B]`.

    Neighbours in sorted data are of one length. The first batch stands for the shortest of `num_batches`
    equal parts of the data, with the length in the middle of that part, and so on.

        histogram of 1 1 1 1 3 3 5 5, two batches of two   ->   [1 1] [3 3]

    Args:
        histogram: int64 `[S]`.
        batch_size: B.
        num_batches: Batches that stand for all.
        rng: NumPy generator.
    """
    upto = np.cumsum(histogram)
    places = (np.arange(num_batches) + 0.5) / num_batches * upto[-1]
    lengths = 1 + np.searchsorted(upto, places, side="right")
    return np.repeat(rng.permutation(lengths)[:, None], batch_size, axis=1)


def make_ways(engines, data):
    """Functions that take a step, by name; arguments as of `training_ways.our_engines`, `Data`."""
    return {
        PLAIN_PACKS: training_ways.way(engines["plain"], data.packed),
        PACKED: training_ways.way(engines["packed"], data.packed),
        PLAIN: training_ways.way(engines["plain"], data.unpacked),
        UNPACKED: training_ways.way(engines["unpacked"], data.unpacked),
    }


@contextlib.contextmanager
def peers(model_config, data):
    """Functions that take a step of the peers, by name, while the block runs.

    On rows padded to S, and in batches sorted by length.
    """
    from benchmarks import keras_hub_reference

    rows = {PADDED: data.unpacked, SORTED: data.by_length}
    ways = {}
    if keras_hub_reference.is_installed():
        ways |= training_ways.keras_hub_ways(model_config, {KERAS_HUB: data.unpacked})
    with training_ways.torch_ways(model_config, rows) as theirs:
        yield ways | theirs


def step_rows(seconds, data, model_config, batch_size, peak):
    """Speeds of all ways: rows of a table.

    The plain model takes packs for single sequences: its steps on packs are only there to be timed. Of sorted
    batches, which are of all lengths, the mean counts; of the others the median.

    Args:
        seconds: Dict from way to list of seconds.
        data: `Data`.
        model_config: `ModelConfig`.
        batch_size: B.
        peak: Operations a second that utilisation is a share of.
    """
    rows = []
    for name, times in seconds.items():
        sums = data.sums(name in (PACKED, PLAIN_PACKS))
        per_step = statistics.mean(times) if name == SORTED else statistics.median(times)
        counts = None if name == PLAIN_PACKS else batch_size / per_step
        rows.append(
            {
                "way": name,
                "s/step": per_step,
                "sequences/s": counts and counts * sums["num_sequences"],
                "real tokens/s": counts and counts * sums["num_tokens"],
                "model-FLOP utilisation, %": counts and 100 * counts * bert_flops(model_config, sums) / peak,
            }
        )
    return rows


def ratio_rows(seconds, data, printed, asked):
    """Overhead and speed-ups with their intervals, beside print and what is asked: rows of a table.

    Args:
        seconds: Dict from way to list of seconds, the n-th of each taken one after the other.
        data: `Data`.
        printed: Dict from `overhead`, `realised` and `share` to what the paper prints; or empty.
        asked: Least share of the packing factor.
    """
    factor, packed = data.plan.packing_factor, seconds[PACKED]
    gains = {
        name: ratios(seconds[name], packed)
        for name in (PLAIN, UNPACKED, PADDED, KERAS_HUB)
        if name in seconds
    }
    overhead = [100 * (ratio - 1) for ratio in ratios(packed, seconds[PLAIN_PACKS])]
    rows = [_row("overhead of packing, % of the step", overhead, printed.get("overhead"))]
    for name, found in gains.items():
        is_its = name == PLAIN  # the paper's baseline
        over = [factor * ratio for ratio in found]
        rows.append(_row(f"speed-up over {name}", over, printed.get("realised") if is_its else None))
        rows.append(
            _row(
                f"share of the packing factor {factor:.3f}, over {name}",
                found,
                printed.get("share") if is_its else None,
                asked if is_its else None,
            )
        )
    if SORTED in seconds:
        # Its steps differ in length; neighbours share a slow minute all the same
        mean = statistics.mean(ratios(seconds[SORTED], packed))
        rows.append({**_row(f"speed-up over {SORTED}", [factor * mean]), "from": None, "to": None})
    return rows


def _row(name, values, printed=None, asked=None):
    low, high = median_interval(values)
    return {
        "figure": name,
        "median": statistics.median(values),
        "from": low,
        "to": high,
        "print": printed,
        "asked": asked,
    }
