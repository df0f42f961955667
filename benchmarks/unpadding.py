"""Speed-up of un-padding by number of devices, against packing.

python -m benchmarks.unpadding --measure --picture=unpadding.png

Legend: B sequences per batch, G sequences per group, S length of a padded row and of a pack.
"""

import dataclasses
import logging
import sys

import numpy as np

from benchmarks import gumbel
from benchmarks.results import Settings, show
from benchmarks.synthetic_data import (
    WIKIPEDIA,
    best_shapes,
    check_positions,
    draw_lengths,
    plan_corpus,
    row_batch,
)
from benchmarks.timing import ratios
from benchmarks.training_steps import build_engine, stepping_through
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.packing.histogram import fold
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend
from data_gen.dry_run import read_histogram

DEVICES = tuple(2**power for power in range(13))
DEPTH = 3  # sequences in a pack, as in the papers
GROUP_SIZE, NUM_SHAPES = 4, 8  # without padding: sequences at once, row lengths that are compiled
WAYS = PADDED, UNPADDED, PACKED = "padded", "unpadded", "packed"
NUM_QUANTILES = 1000  # lengths that the shapes are chosen for
LEAST_VALUES = 10  # of which a distribution can be fitted
PRINTED_SPEED_UP = 1.913  # of packing, Table 1
PRINTED = {  # of Section 4.4 and Section E
    "mode of one device": 1.94,
    "beta of one device": 0.108,
    "gain on 32 devices, %": 50.0,
    "gain on 2048 devices, %": 30.0,
}
BESIDE_PRINT, BY_PAPER, OUR_DEVICE, BY_OURS = (
    *("beside print", "scaling, the paper's times", "one device here", "scaling, times from here"),
)


@dataclasses.dataclass(frozen=True)
class UnpaddingConfig(Settings):
    """Figures 5 and 6 and Section E of "Efficient Sequence Packing without Cross-contamination": without
    padding the time of a batch depends on its sequences, and all devices wait for the slowest. From the
    Gumbel distribution that the authors fitted to the speed-ups of 8 GPUs follows that of one device, and
    from it what to expect at any number of devices. Packs take the same time everywhere.

    --measure does the same with batch times of this machine, one device that is taken for many. Without
    padding the sequences of a batch run group by group, longest first, each group in rows as long as it
    needs, of a few compiled shapes.
    """

    measure: bool = setting(False, "also measure batches of this machine")
    bert_config_file: str = setting("bert-tiny", "size, or config file, of the model", only_with="measure")
    histogram: str = setting(WIKIPEDIA, "lengths: a name, or a JSON file", only_with="measure")
    max_seq_length: int = setting(512, "tokens of a row and of a pack", minimum=16, only_with="measure")
    batch_size: int = setting(32, "sequences, or packs, in a batch", minimum=GROUP_SIZE, only_with="measure")
    repeats: int = setting(40, "timed batches of each way", minimum=LEAST_VALUES, only_with="measure")
    picture: str = setting("", "also draw Figures 5 and 6 into this PNG")

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size % GROUP_SIZE:
            raise InputError(f"`batch_size` must be a multiple of {GROUP_SIZE}. Received: {self.batch_size}.")


def main(config):
    """Estimate, measure with `--measure`, print, write and draw."""
    one = gumbel.of_one_device(gumbel.PRINTED_8, 8)
    tables = {BESIDE_PRINT: beside_print(one), BY_PAPER: printed_scaling(one)}
    measured, notes = None, []
    if config.measure:
        seconds, factor, padding = measure_times(config)
        speed_ups = ratios(seconds[PADDED], seconds[UNPADDED])
        own = gumbel.fit(speed_ups)
        of_packs = [factor * ratio for ratio in ratios(seconds[PADDED], seconds[PACKED])]
        tables[OUR_DEVICE] = [describe(seconds, factor, speed_ups, own)]
        tables[BY_OURS] = measured_scaling(speed_ups, of_packs, own)
        measured, notes = (speed_ups, own), [f"{padding:.1%} of the rows without padding is padding"]
    show("unpadding", config, tables, notes)
    if config.picture:
        draw(tables, one, measured, config.picture)


def measure_times(config):
    """Interleave batches: seconds by way, the packing factor, the share of padding in rows of groups."""
    choose_backend()
    import keras  # only now

    model_config, length = load_model_config(config.bert_config_file), config.max_seq_length
    check_positions(length, model_config)
    corpus = plan_corpus(fold(read_histogram(config.histogram, ""), length), DEPTH)
    # TensorFlow warns of a function that is traced for many shapes, which is meant here
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    # A batch without padding is several calls: an update that costs next to nothing
    engine = build_engine(model_config, optimizer=keras.optimizers.SGD(0.0))
    rng, vocab_size = np.random.default_rng(0), model_config.vocab_size
    shapes = best_shapes(quantiles(corpus.histogram), NUM_SHAPES)
    drawn = [draw_lengths(corpus.histogram, config.batch_size, rng) for _ in range(config.repeats)]
    groups = [split_into_groups(lengths, shapes) for lengths in drawn]
    of_groups = [[row_batch(*group, vocab_size, rng) for group in of_batch] for of_batch in groups]
    for shape in shapes:  # compile all before the first timed batch, whichever of them it has
        stepping_through(engine, [row_batch([shape] * GROUP_SIZE, int(shape), vocab_size, rng)])(0)
    ways = {
        # One batch each: their content does not change their time
        PADDED: stepping_through(engine, [corpus.unpacked_batch(config.batch_size, vocab_size, rng)]),
        UNPADDED: lambda repeat: stepping_through(engine, of_groups[repeat])(repeat),
        PACKED: stepping_through(engine, [corpus.packed_batch(config.batch_size, vocab_size, rng)]),
    }
    positions = sum(len(lengths) * shape for of_batch in groups for lengths, shape in of_batch)
    padding = 1 - sum(int(lengths.sum()) for lengths in drawn) / positions
    return time_interleaved(ways, config.repeats), corpus.plan.packing_factor, padding


def split_into_groups(lengths, shapes, group_size=GROUP_SIZE):
    """Split a batch's sequences, longest first, into groups of G with the row length of each.

    lengths [3 9 5 2], groups of 2, shapes [4 10]   ->   ([9 5], 10) ([3 2], 4)
    """
    ordered = np.sort(lengths)[::-1].reshape(-1, group_size)
    return [(group, int(shapes[np.searchsorted(shapes, group[0])])) for group in ordered]


def quantiles(histogram):
    """Lengths with the spread of a histogram, its longest among them: int64 `[NUM_QUANTILES + 1]`."""
    upto = np.cumsum(histogram)
    wanted = np.linspace(0, 1, NUM_QUANTILES + 1) * upto[-1]
    return 1 + np.searchsorted(upto, np.maximum(wanted, 1))


def beside_print(one):
    """The paper's estimate as printed, and as it follows from its own equations: rows of a table."""

    def gains(of):
        return {
            f"gain on {number} devices, %": 100 * (gumbel.expected_least(of, number) - 1)
            for number in (32, 2048)
        }

    ours = {"mode of one device": one.alpha, "beta of one device": one.beta, **gains(one)}
    with_slip = gains(gumbel.Gumbel(PRINTED["mode of one device"], PRINTED["beta of one device"]))
    return [
        {"figure": name, "print": PRINTED[name], "ours": value, "with the printed beta": with_slip.get(name)}
        for name, value in ours.items()
    ]


def printed_scaling(one):
    """Speed-ups over padding with the paper's constants: a row of a table for each number of devices."""
    rows = []
    for number in DEVICES:
        expected = gumbel.expected_least(one, number)
        row = {"devices": number, "un-padding": expected, "packing": PRINTED_SPEED_UP}
        rows.append({**row, "packing / un-padding": PRINTED_SPEED_UP / expected})
    return rows


def measured_scaling(speed_ups, of_packs, own, devices=DEVICES):
    """Speed-ups over padding by batches of this machine: a row of a table for each number of devices.

    `own` is the `Gumbel` fitted to the speed-ups of batches without padding.
    """
    # As in the paper un-padding follows its Gumbel distribution and packs take their median time everywhere.
    # `seen` has both as the mean of the least of n batches seen: the clock's noise weighs on both alike
    packing = float(np.median(of_packs))
    rows = []
    for number in devices:
        expected = gumbel.expected_least(own, number)
        seen, packing_seen = (gumbel.expected_least_of_values(one, number) for one in (speed_ups, of_packs))
        row = {"devices": number, "un-padding": expected, "packing": packing}
        row |= {"packing / un-padding": packing / expected, "un-padding, seen": seen}
        rows.append({**row, "packing, seen": packing_seen, "packing / un-padding, seen": packing_seen / seen})
    return rows


def describe(seconds, factor, speed_ups, own):
    """One device of this machine: a row of a table."""
    return {
        "batches": len(speed_ups),
        **{f"{way}, s": float(np.median(seconds[way])) for way in WAYS},
        "packing factor": factor,
        "alpha": own.alpha,
        "beta": own.beta,
        "least": min(speed_ups),
        "mean": float(np.mean(speed_ups)),
        "largest": max(speed_ups),
    }


def draw(tables, one, measured, path):
    """Draw speed-ups by devices, and densities of those of 8 devices and of one, as PNG."""
    from benchmarks.gumbel import PRINTED_8
    from benchmarks.pictures import new_figure, save_picture

    figure, ((scaling, spread),) = new_figure(2)
    for name, style, source in ((BY_PAPER, "-", "paper"), (BY_OURS, "--", "here")):
        rows = tables.get(name, [])
        for way, color in (("un-padding", "C1"), ("packing", "C0")) if rows else ():
            points = [row["devices"] for row in rows], [row[way] for row in rows]
            scaling.plot(*points, style, color=color, label=f"{way}, {source}")
    scaling.set_xscale("log", base=2)
    scaling.set(title="Speed-up over padding", xlabel="devices")
    at = np.linspace(0.5, 4.0, 400)
    spread.plot(at, PRINTED_8.density(at), "-", color="C2", label="8 GPUs, paper")
    spread.plot(at, one.density(at), "-", color="C1", label="one GPU, paper")
    if measured:
        speed_ups, own = measured
        spread.hist(speed_ups, bins="auto", density=True, color="0.8", label="one device, here")
        spread.plot(at, own.density(at), "--", color="C1", label="its Gumbel")
    spread.set(title="Un-padding of one device: density", xlabel="speed-up")
    for axes in (scaling, spread):
        axes.legend(fontsize="small")
    save_picture(figure, path)


if __name__ == "__main__":
    sys.exit(run(main, UnpaddingConfig))
