"""Command line: how the speed-up of un-padding falls with the number of devices, against packing.

python -m bert_packed.reports.unpadding_scaling --measure --picture=unpadding.png
"""

import dataclasses
import itertools
import sys

from data_gen.cli.command_line import print_table, run, write_json
from data_gen.cli.settings import InputError, check_divides, check_settings, setting

DESCRIPTION = """
Figures 5 and 6 and Section E of "Efficient Sequence Packing without Cross-contamination": without padding the
time of a batch depends on its sequences, and all devices wait for the slowest. From the Gumbel distribution
that the authors fitted to the speed-ups of 8 GPUs comes that of one device, and from it what to expect at any
number of devices. Packs take the same time everywhere.

--measure does the same with batch times of this machine, one device that is taken for many.
"""
DEVICES = ",".join(str(2**power) for power in range(13))
PRINTED_SPEED_UP = 1.913  # of packing, Table 1
PRINTED = {  # of Section 4.4 and Section E
    "mode of one device": 1.94,
    "beta of one device": 0.108,
    "gain on 32 devices, %": 50.0,
    "gain on 2048 devices, %": 30.0,
}


def parse_devices(text):
    """`--devices`: whole numbers from 1, ascending, with commas."""
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers) or any(
        int(one) >= int(next_one) for one, next_one in itertools.pairwise(numbers)
    ):
        raise ValueError("whole numbers from 1, ascending, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    devices: str = setting(DEVICES, "numbers of devices, comma-separated, ascending", parse=parse_devices)
    measure: bool = setting(False, "also measure batches of this machine")
    times_file: str = setting("", "also take batch times from this file: the JSON of an earlier --measure")
    bert_config_file: str = setting("bert-tiny", "with measure: size, or bert_config.json, of the model")
    histogram: str = setting(
        "wikipedia_512", "with measure: lengths of the sequences, a name that the package has or a JSON file"
    )
    max_seq_length: int = setting(512, "with measure: tokens of a padded row and of a pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "with measure: most sequences in a pack", minimum=1)
    batch_size: int = setting(32, "with measure: sequences, or packs, in a device's batch", minimum=1)
    group_size: int = setting(4, "with measure: sequences that run at once without padding", minimum=1)
    num_shapes: int = setting(8, "with measure: row lengths without padding, each one program", minimum=1)
    repeats: int = setting(40, "with measure: timed batches of each way", minimum=10)
    random_seed: int = setting(0, "with measure: of the sequences drawn", minimum=0)
    picture: str = setting("", "also draw Figures 5 and 6 into this PNG")
    json: str = setting("", "also write tables and measured times to this file")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "group_size", "batch_size")
        if self.measure and self.times_file:
            raise InputError(f"`times_file` must be left out with measure. Received: {self.times_file}.")


def main(config):
    """Estimate, measure where asked, print, write and draw."""
    # SciPy, and TensorFlow where it is measured: not for --help
    from bert_packed.reports import gumbel

    one = gumbel.of_one_device(gumbel.PRINTED_8, 8)
    devices = [int(number) for number in config.devices.split(",")]
    tables = {
        "beside print": beside_print(one),
        "scaling, the paper's times": printed_scaling(one, devices),
    }
    times, own, about = _own_times(config), None, {}
    if times:
        own = gumbel.fit(times.speed_ups)
        tables["one device here"] = [describe_times(times, own)]
        tables["scaling, times from here"] = measured_scaling(times, own, devices)
        about = {"times": dataclasses.asdict(times)}
    for name, rows in tables.items():
        print(f"\n{name}")
        print_table(rows)
    if config.json:
        write_json(config.json, {**tables, **about})
    if config.picture:
        from bert_packed.reports.unpadding_picture import draw

        draw(tables, gumbel.PRINTED_8, one, times and (times.speed_ups, own), config.picture)


def beside_print(one):
    """What the paper prints of its estimate, and ours: rows of a table."""
    from bert_packed.reports import gumbel

    ours = {
        "mode of one device": one.alpha,
        "beta of one device": one.beta,
        **{
            f"gain on {number} devices, %": 100 * (gumbel.expected_least(one, number) - 1)
            for number in (32, 2048)
        },
    }
    slip = gumbel.Gumbel(PRINTED["mode of one device"], PRINTED["beta of one device"])
    with_slip = {
        f"gain on {number} devices, %": 100 * (gumbel.expected_least(slip, number) - 1)
        for number in (32, 2048)
    }
    return [
        {"figure": name, "print": PRINTED[name], "ours": value, "with the printed beta": with_slip.get(name)}
        for name, value in ours.items()
    ]


def printed_scaling(one, devices):
    """Speed-ups over padding with the paper's constants: rows of a table, one for each number of devices."""
    from bert_packed.reports import gumbel

    rows = []
    for number in devices:
        expected = gumbel.expected_least(one, number)
        rows.append(
            {
                "devices": number,
                "un-padding": expected,
                "packing": PRINTED_SPEED_UP,
                "packing / un-padding": PRINTED_SPEED_UP / expected,
            }
        )
    return rows


def measured_scaling(times, own, devices):
    """Speed-ups over padding with our own batch times: rows of a table.

    Args:
        times: `unpadded_times.Times`.
        own: `Gumbel` fitted to its speed-ups.
        devices: Numbers of devices.
    """
    from bert_packed.reports import gumbel

    rows = []
    for number in devices:
        expected = gumbel.expected_least(own, number)
        rows.append(
            {
                "devices": number,
                "un-padding": expected,
                "of the batches seen": gumbel.expected_least_of_values(times.speed_ups, number),
                "packing": times.packing_speed_up,
                "packing / un-padding": times.packing_speed_up / expected,
            }
        )
    return rows


def describe_times(times, own):
    """What was measured of one device: a row of a table."""
    import numpy as np

    speed_ups = times.speed_ups
    return {
        "batches": len(speed_ups),
        "padded, s": float(np.median(times.padded)),
        "unpadded, s": float(np.median(times.unpadded)),
        "packed, s": float(np.median(times.packed)),
        "packing factor": times.packing_factor,
        "alpha": own.alpha,
        "beta": own.beta,
        "least": min(speed_ups),
        "mean": float(np.mean(speed_ups)),
        "largest": max(speed_ups),
    }


def _own_times(config):
    """`Times` of a file or of this machine; None where neither is asked for."""
    if config.times_file:
        from bert_packed.reports.unpadded_times import read_times

        return read_times(config.times_file)
    if not config.measure:
        return None
    from bert_packed.training.engines import choose_backend

    backend = choose_backend()
    from bert_packed.config import load_model_config
    from bert_packed.reports.data_benchmark import cpu_name
    from bert_packed.reports.unpadded_times import measure_times
    from data_gen.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
    from data_gen.packing.histogram import fold
    from data_gen.records.read_lengths import read_histogram

    histogram = fold(read_histogram(config.histogram, ""), config.max_seq_length)
    plan = ALGORITHMS[DEFAULT_ALGORITHM](histogram, config.max_seq_length, config.max_sequences_per_pack)
    times, padding = measure_times(
        load_model_config(config.bert_config_file),
        histogram,
        plan,
        config.batch_size,
        config.group_size,
        config.num_shapes,
        config.repeats,
        config.random_seed,
    )
    print(
        f"CPU: {cpu_name()}; backend {backend}; {config.bert_config_file}, batches of {config.batch_size}, "
        f"{padding:.1%} of the rows without padding is padding"
    )
    return times


if __name__ == "__main__":
    sys.exit(run(main, ScalingConfig, DESCRIPTION))
