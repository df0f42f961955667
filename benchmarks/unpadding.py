"""Speed-up of un-padding by number of devices, against packing.

python -m benchmarks.unpadding --measure --picture=unpadding.png

Legend: B sequences per batch, G sequences per group, S length of a padded row and of a pack.
"""

import dataclasses
import itertools
import logging
import sys

from benchmarks.results import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import check_depth_fits, check_divides, parse_depth, setting

DESCRIPTION = """
Figures 5 and 6 and Section E of "Efficient Sequence Packing without Cross-contamination": without padding
the time of a batch depends on its sequences, and all devices wait for the slowest. From the Gumbel
distribution that the authors fitted to the speed-ups of 8 GPUs follows that of one device, and from it what
to expect at any number of devices. Packs take the same time everywhere.

--measure does the same with batch times of this machine, one device that is taken for many. Without padding
the sequences of a batch run group by group, longest first, each group in rows as long as it needs, of a few
compiled shapes.
"""
DEVICES = ",".join(str(2**power) for power in range(13))
MOST_DEVICES = 10**9
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


def _parse_devices(text):
    numbers = text.split(",")
    if not all(number.isdecimal() and 0 < int(number) <= MOST_DEVICES for number in numbers) or any(
        int(one) >= int(next_one) for one, next_one in itertools.pairwise(numbers)
    ):
        raise ValueError(f"whole numbers from 1 to {MOST_DEVICES:,}, ascending, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class UnpaddingConfig(Settings):
    """Every flag of the command; checks itself, raises `InputError`."""

    devices: str = setting(DEVICES, "numbers of devices, comma-separated, ascending", parse=_parse_devices)
    measure: bool = setting(False, "also measure batches of this machine")
    bert_config_file: str = setting(
        "bert-tiny", "size, or bert_config.json, of the model", only_with="measure"
    )
    histogram: str = setting(
        "wikipedia_512",
        "lengths of the sequences, a name that the package has or a JSON file",
        only_with="measure",
    )
    max_seq_length: int = setting(
        512, "tokens of a padded row and of a pack", minimum=16, only_with="measure"
    )
    max_sequences_per_pack: int | str = setting(
        3, 'most sequences in a pack, or "max"', parse=parse_depth, only_with="measure"
    )
    batch_size: int = setting(32, "sequences, or packs, in a device's batch", minimum=1, only_with="measure")
    group_size: int = setting(4, "sequences that run at once without padding", minimum=1, only_with="measure")
    num_shapes: int = setting(
        8, "row lengths without padding, each one program", minimum=1, only_with="measure"
    )
    repeats: int = setting(40, "timed batches of each way", minimum=LEAST_VALUES, only_with="measure")
    picture: str = setting("", "also draw Figures 5 and 6 into this PNG")

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "group_size", "batch_size")
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)


def main(config):
    """Estimate, measure with `--measure`, print, write and draw."""
    from benchmarks import gumbel  # SciPy: not for --help

    one = gumbel.of_one_device(gumbel.PRINTED_8, 8)
    devices = [int(number) for number in config.devices.split(",")]
    tables = {BESIDE_PRINT: beside_print(one), BY_PAPER: printed_scaling(one, devices)}
    times, own, notes = None, None, []
    if config.measure:
        times, padding = measure_times(config)
        notes = [f"{padding:.1%} of the rows without padding is padding"]
        own = gumbel.fit(times.speed_ups)
        tables |= {
            OUR_DEVICE: [describe_times(times, own)],
            BY_OURS: measured_scaling(times, own, devices),
        }
    show("unpadding", config, tables, notes)
    if config.picture:
        draw(tables, one, times and (times.speed_ups, own), config.picture)


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
        from benchmarks.timing import ratios

        return ratios(self.padded, self.unpadded)

    @property
    def packing_speed_ups(self):
        """Of each batch of packs, over its padded neighbour, in sequences a second: list of float."""
        from benchmarks.timing import ratios

        return [self.packing_factor * ratio for ratio in ratios(self.padded, self.packed)]


def measure_times(config):
    """Interleave batches of all ways, forward and backward with one cheap update a call.

    Returns:
        `Times`, and the share of padding that is left in the rows of groups, 0..1.
    """
    from bert_packed.training.engines import choose_backend

    choose_backend()
    # TensorFlow and Keras: not for --help
    import keras
    import numpy as np

    from benchmarks.synthetic_data import (
        bert_batch,
        best_shapes,
        check_positions,
        draw_lengths,
        plan_corpus,
        row_spec,
    )
    from benchmarks.training_steps import build_engine, stepping_through
    from bert_packed.config import load_model_config
    from bert_packed.packing.histogram import fold
    from bert_packed.records.read_lengths import read_histogram
    from bert_packed.runs.interleaved_timing import time_interleaved

    model_config, length = load_model_config(config.bert_config_file), config.max_seq_length
    check_positions(length, model_config)
    histogram = fold(read_histogram(config.histogram, ""), length)
    corpus = plan_corpus(histogram, config.max_sequences_per_pack)
    # TensorFlow warns of a function that is traced for many shapes, which is meant here
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    engine = build_engine(model_config, optimizer=keras.optimizers.SGD(0.0))
    rng, vocab_size = np.random.default_rng(0), model_config.vocab_size
    shapes = best_shapes(quantiles(corpus.histogram), config.num_shapes)

    def rows(lengths, row_length):
        packs = [(int(one),) for one in lengths]
        return bert_batch(packs, row_spec(row_length, length), length, vocab_size, rng)

    drawn = [draw_lengths(histogram, config.batch_size, rng) for _ in range(config.repeats)]
    groups = [split_into_groups(lengths, config.group_size, shapes) for lengths in drawn]
    of_groups = [[rows(*group) for group in of_batch] for of_batch in groups]
    for shape in shapes:  # compile all, whichever the first batch has
        stepping_through(engine, [rows([shape] * config.group_size, int(shape))])(0)
    ways = {
        # their content does not change their time: one batch each
        PADDED: stepping_through(engine, [corpus.unpacked_batch(config.batch_size, vocab_size, rng)]),
        UNPADDED: lambda repeat: stepping_through(engine, of_groups[repeat])(repeat),
        PACKED: stepping_through(engine, [corpus.packed_batch(config.batch_size, vocab_size, rng)]),
    }
    seconds = time_interleaved(ways, config.repeats)
    positions = sum(len(lengths) * shape for of_batch in groups for lengths, shape in of_batch)
    padding = 1 - sum(int(lengths.sum()) for lengths in drawn) / positions
    return Times(**seconds, packing_factor=corpus.plan.packing_factor), float(padding)


def split_into_groups(lengths, group_size, shapes):
    """Split a batch's sequences, longest first, into groups with the row length of each.

        lengths [3 9 5 2], groups of 2, shapes [4 10]   ->   ([9 5], 10) ([3 2], 4)

    Args:
        lengths: Int `[B]`.
        group_size: G, divides B.
        shapes: Row lengths, ascending, the last at least the longest length.

    Returns:
        List of (int array `[G]`, row length).
    """
    import numpy as np

    ordered = np.sort(lengths)[::-1].reshape(-1, group_size)
    return [(group, int(shapes[np.searchsorted(shapes, group[0])])) for group in ordered]


def quantiles(histogram):
    """Lengths with the spread of a histogram, its longest among them: int64 `[NUM_QUANTILES + 1]`."""
    import numpy as np

    upto = np.cumsum(histogram)
    wanted = np.linspace(0, 1, NUM_QUANTILES + 1) * upto[-1]
    return 1 + np.searchsorted(upto, np.maximum(wanted, 1))


def beside_print(one):
    """The paper's estimate as printed, and as it follows from its own equations: rows of a table."""
    from benchmarks import gumbel

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


def printed_scaling(one, devices):
    """Speed-ups over padding with the paper's constants: a row of a table for each number of devices."""
    from benchmarks import gumbel

    rows = []
    for number in devices:
        expected = gumbel.expected_least(one, number)
        row = {"devices": number, "un-padding": expected, "packing": PRINTED_SPEED_UP}
        rows.append({**row, "packing / un-padding": PRINTED_SPEED_UP / expected})
    return rows


def measured_scaling(times, own, devices):
    """Speed-ups over padding with our own batch times: a row of a table for each number of devices.

    As in the paper un-padding follows its Gumbel distribution and packs take their median time everywhere.
    `seen` has both as the mean of the least of n of the batches seen: the clock's noise weighs on both alike.

    Args:
        times: `Times`.
        own: `Gumbel` fitted to its speed-ups.
        devices: Numbers of devices.
    """
    import numpy as np

    from benchmarks import gumbel

    packing = float(np.median(times.packing_speed_ups))
    rows = []
    for number in devices:
        expected = gumbel.expected_least(own, number)
        seen, packing_seen = (
            gumbel.expected_least_of_values(values, number)
            for values in (times.speed_ups, times.packing_speed_ups)
        )
        rows.append(
            {
                "devices": number,
                "un-padding": expected,
                "packing": packing,
                "packing / un-padding": packing / expected,
                "un-padding, seen": seen,
                "packing, seen": packing_seen,
                "packing / un-padding, seen": packing_seen / seen,
            }
        )
    return rows


def describe_times(times, own):
    """Times of one device, and their distribution: a row of a table."""
    import numpy as np

    speed_ups = times.speed_ups
    return {
        "batches": len(speed_ups),
        **{f"{way}, s": float(np.median(getattr(times, way))) for way in WAYS},
        "packing factor": times.packing_factor,
        "alpha": own.alpha,
        "beta": own.beta,
        "least": min(speed_ups),
        "mean": float(np.mean(speed_ups)),
        "largest": max(speed_ups),
    }


def draw(tables, one, measured, path):
    """Draw speed-ups by devices, and densities of the speed-ups of 8 devices and of one, as PNG.

    Args:
        tables: As printed.
        one: `Gumbel` of one of the paper's devices.
        measured: List of our own speed-ups and the `Gumbel` fitted to them; None for none.
        path: Of the PNG.
    """
    import numpy as np

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
    sys.exit(run(main, UnpaddingConfig, DESCRIPTION))
