"""How long training batches take on this machine without padding, beside padded rows and packs.

A batch is a device's part of a step, B sequences. Without padding they run group by group, longest first,
each group in rows as long as it needs, of a few compiled shapes. The un-padding of the papers runs a kernel
for each sequence; here too the time follows from the lengths that a batch happens to hold.

Legend: B sequences per batch, G sequences per group, S length of a padded row and of a pack.
"""

import dataclasses
import functools
import json
import logging

import numpy as np

from benchmarks.random_batches import (
    draw_lengths,
    draw_packs,
    random_batch,
    spec_of_plan,
    spec_of_rows,
)
from benchmarks.sequence_batches import best_shapes
from bert_packed.core.settings import InputError
from bert_packed.runs.interleaved_timing import ratios, time_interleaved

WAYS = ("padded", "unpadded", "packed")
QUANTILES = 1000  # lengths that the shapes are chosen for
LEAST_VALUES = 10  # of which a distribution can be told


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of batches, the n-th of each way taken next to the n-th of the others.

    Attributes:
        padded: Of B rows of S.
        unpadded: Of B sequences without padding.
        packed: Of B packs of S.
        packing_factor: Mean sequences per pack of all the data.
    """

    padded: list[float]
    unpadded: list[float]
    packed: list[float]
    packing_factor: float

    @property
    def speed_ups(self):
        """Of each batch without padding, over its padded neighbour: list of float."""
        return ratios(self.padded, self.unpadded)

    @property
    def packing_speed_ups(self):
        """Of each batch of packs, over its padded neighbour, in sequences a second: list of float."""
        return [self.packing_factor * ratio for ratio in ratios(self.padded, self.packed)]


def read_times(path):
    """Times from a file: `Times`.

    Args:
        path: JSON with an object `times`, as `unpadding_scaling --measure --json` writes it.

    Raises:
        InputError: there are no such times, or too few of them.
    """
    names = [field.name for field in dataclasses.fields(Times)]
    try:
        with open(path) as file:
            content = json.load(file)["times"]
        factor = float(content["packing_factor"])
        seconds = {name: np.array([float(value) for value in content[name]]) for name in WAYS}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"`times_file` must be JSON with `times` of {', '.join(names)}. Received: {path}, {error!r}."
        ) from error
    sizes = {len(values) for values in seconds.values()}
    if len(sizes) > 1 or min(sizes) < LEAST_VALUES:
        raise InputError(
            f"`times_file` must hold as many seconds of {', '.join(WAYS)}, {LEAST_VALUES} at least. "
            f"Received: {path}, {', '.join(f'{len(values)} of {name}' for name, values in seconds.items())}."
        )
    numbers = np.concatenate([*seconds.values(), [factor]])
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise InputError(f"`times_file` must hold numbers above 0. Received: {path}, with others.")
    return Times(**{name: values.tolist() for name, values in seconds.items()}, packing_factor=factor)


def measure_times(model_config, histogram, plan, batch_size, group_size, num_shapes, num_repeats, seed=0):
    """Measure batches in alternating turns, forward and backward with one cheap update a call.

    Args:
        model_config: `ModelConfig`.
        histogram: int64 `[S]`, of the data.
        plan: `PackingPlan` of the same.
        batch_size: B.
        group_size: G, divides B.
        num_shapes: Row lengths that groups are filled up to.
        num_repeats: Timed batches of each way.
        seed: Of the sequences drawn.

    Returns:
        `Times`, and the share of padding that is left in the rows of groups, 0..1.
    """
    rng = np.random.default_rng(seed)
    shapes = best_shapes(_quantiles(histogram), num_shapes)
    longest = len(histogram)
    make = functools.partial(random_batch, limit=longest, vocab_size=model_config.vocab_size, rng=rng)
    row = spec_of_rows(longest, longest)
    drawn = [draw_lengths(histogram, batch_size, rng) for _ in range(num_repeats)]
    groups = [split_into_groups(lengths, group_size, shapes) for lengths in drawn]
    steps = {
        # what is in them does not change their time: one batch each
        "padded": [[make([(length,) for length in drawn[0]], row)]],
        "unpadded": [
            [
                make([(length,) for length in lengths], spec_of_rows(shape, longest))
                for lengths, shape in of_batch
            ]
            for of_batch in groups
        ],
        "packed": [[make(draw_packs(plan, batch_size, rng), spec_of_plan(plan))]],
    }
    step = _cheap_step(model_config)
    for shape in shapes:  # compile all, whichever the first batch has
        step(make([(int(shape),)] * group_size, spec_of_rows(shape, longest)))
    seconds = time_interleaved(
        {name: functools.partial(_take, step, steps[name]) for name in WAYS}, num_repeats
    )
    positions = sum(len(lengths) * shape for of_batch in groups for lengths, shape in of_batch)
    padding = 1 - sum(int(lengths.sum()) for lengths in drawn) / positions
    return Times(**seconds, packing_factor=plan.packing_factor), float(padding)


def split_into_groups(lengths, group_size, shapes):
    """A batch's sequences, longest first, in groups with the row length of each.

        lengths [3 9 5 2], groups of 2, shapes [4 10]   ->   ([9 5], 10) ([3 2], 4)

    Args:
        lengths: Int `[B]`.
        group_size: G, divides B.
        shapes: Row lengths, ascending, the last at least the longest length.

    Returns:
        List of (int array `[G]`, row length).
    """
    ordered = np.sort(lengths)[::-1].reshape(-1, group_size)
    return [(group, int(shapes[np.searchsorted(shapes, group[0])])) for group in ordered]


def _quantiles(histogram):
    """Lengths with the spread of a histogram, its longest among them: int64 `[QUANTILES + 1]`."""
    upto = np.cumsum(histogram)
    wanted = np.linspace(0, 1, QUANTILES + 1) * upto[-1]
    return 1 + np.searchsorted(upto, np.maximum(wanted, 1))


def _cheap_step(model_config):
    """A training step whose update costs next to nothing: a batch may be several calls."""
    import keras

    from benchmarks.benchmark_engine import RECIPE
    from bert_packed.objectives.pretraining import pretraining_objective
    from bert_packed.training.engines import make_engine

    objective = pretraining_objective(RECIPE.mlm_loss)
    model = objective.build_model(model_config, seed=0)
    # TensorFlow warns of a function that is traced for many shapes, which is meant here
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return make_engine(model, objective, keras.optimizers.SGD(0.0)).train_step


def _take(step, batches, repeat):
    """Run all calls of a batch, and wait for the device."""
    for batch in batches[repeat % len(batches)]:
        sums = step(batch)
    float(sums["num_sequences"])
