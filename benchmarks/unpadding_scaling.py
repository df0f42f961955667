"""Command line: how the speed-up of un-padding falls with the number of devices, against packing.

python -m benchmarks.unpadding_scaling --measure --picture=unpadding.png
"""

import dataclasses
import itertools
import sys

from bert_packed.core.command_line import print_table, run
from bert_packed.core.output_files import write_json
from bert_packed.core.settings import (
    InputError,
    check_depth_fits,
    check_divides,
    check_settings,
    parse_depth,
    setting,
)
from bert_packed.packing.algorithms import DEFAULT_ALGORITHM

DESCRIPTION = """
Figures 5 and 6 and Section E of "Efficient Sequence Packing without Cross-contamination": without padding the
time of a batch depends on its sequences, and all devices wait for the slowest. From the Gumbel distribution
that the authors fitted to the speed-ups of 8 GPUs comes that of one device, and from it what to expect at any
number of devices. Packs take the same time everywhere.

--measure does the same with batch times of this machine, one device that is taken for many.
"""
DEVICES = ",".join(str(2**power) for power in range(13))
MOST_DEVICES = 10**9
NOT_OF_MEASURING = ("devices", "measure", "times_file", "picture", "json")


def parse_devices(text):
    """`--devices`: whole numbers from 1 to `MOST_DEVICES`, ascending, with commas."""
    numbers = text.split(",")
    if not all(number.isdecimal() and 0 < int(number) <= MOST_DEVICES for number in numbers) or any(
        int(one) >= int(next_one) for one, next_one in itertools.pairwise(numbers)
    ):
        raise ValueError(f"whole numbers from 1 to {MOST_DEVICES:,}, ascending, separated by commas")
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
    max_sequences_per_pack: int | str = setting(
        3, 'with measure: most sequences in a pack, or "max"', parse=parse_depth
    )
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
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not self.measure and value != field.default and field.name not in NOT_OF_MEASURING:
                raise InputError(f"`{field.name}` must be left out unless --measure. Received: {value}.")


def main(config):
    """Estimate, measure where asked, print, write and draw."""
    # SciPy, and TensorFlow where it is measured: not for --help
    from benchmarks import gumbel, unpadding_tables

    one = gumbel.of_one_device(gumbel.PRINTED_8, 8)
    devices = [int(number) for number in config.devices.split(",")]
    tables = {
        "beside print": unpadding_tables.beside_print(one),
        "scaling, the paper's times": unpadding_tables.printed_scaling(one, devices),
    }
    times, own, about = _own_times(config), None, {}
    if times:
        own = gumbel.fit(times.speed_ups)
        tables["one device here"] = [unpadding_tables.describe_times(times, own)]
        tables["scaling, times from here"] = unpadding_tables.measured_scaling(times, own, devices)
        about = {"times": dataclasses.asdict(times)}
    for name, rows in tables.items():
        print(f"\n{name}")
        print_table(rows)
    if config.json:
        write_json(config.json, {**tables, **about})
    if config.picture:
        from benchmarks.unpadding_picture import draw

        draw(tables, gumbel.PRINTED_8, one, times and (times.speed_ups, own), config.picture)


def _own_times(config):
    """`Times` of a file or of this machine; None where neither is asked for."""
    if config.times_file:
        from benchmarks.unpadded_times import read_times

        return read_times(config.times_file)
    if not config.measure:
        return None
    from bert_packed.training.engines import choose_backend

    backend = choose_backend()
    from benchmarks.random_batches import check_positions
    from benchmarks.this_machine import cpu_name
    from benchmarks.unpadded_times import measure_times
    from bert_packed.assembly.length_plan import plan_lengths
    from bert_packed.config import load_model_config
    from bert_packed.packing.histogram import fold
    from bert_packed.packing.plan import from_json
    from bert_packed.records.read_lengths import read_histogram

    model_config, length = load_model_config(config.bert_config_file), config.max_seq_length
    check_positions(length, model_config)
    histogram = fold(read_histogram(config.histogram, ""), length)
    plan = plan_lengths(histogram, DEFAULT_ALGORITHM, length, config.max_sequences_per_pack)["plan"]
    times, padding = measure_times(
        model_config,
        histogram,
        from_json(plan),
        batch_size=config.batch_size,
        group_size=config.group_size,
        num_shapes=config.num_shapes,
        num_repeats=config.repeats,
        seed=config.random_seed,
    )
    print(
        f"CPU: {cpu_name()}; backend {backend}; {config.bert_config_file}, batches of {config.batch_size}, "
        f"{padding:.1%} of the rows without padding is padding"
    )
    return times


if __name__ == "__main__":
    sys.exit(run(main, ScalingConfig, DESCRIPTION))
