"""Command line: what packing gains in training speed, and what share of that it promises.

python -m benchmarks.speed_up --bert_config_file=bert-mini --histogram=wikipedia_512
"""

import contextlib
import dataclasses
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
from bert_packed.packing.algorithms import ALGORITHM_NAMES, DEFAULT_ALGORITHM
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Tables 1 and 2 of "Efficient Sequence Packing without Cross-contamination", measured: training steps of one
shape in alternating turns, on packs and on one sequence a row, by this package and by a plain BERT that knows
nothing of packs; with --reference also by transformers on torch, in a process of its own as its users have
it, on rows padded to one length and in batches sorted by length, and by KerasHub, padded, where it is
installed.

The packing factor is that of a plan for all sequences of the data. The tokens are random: what a step costs
depends on none. Intervals hold the median of endlessly many neighbouring steps with a confidence of 95 %.
"""
HISTOGRAM = "wikipedia_512"
ASKED = 0.98  # realised speed-up over packing factor
# Table 1 of the paper, on an IPU, by algorithm and depth: overhead, %, realised speed-up, packing factor
PRINTED = {
    ("spfhp", 2): (4.283, 1.544, 1.612),
    ("spfhp", 3): (4.287, 1.716, 1.790),
    ("nnlshp", 3): (4.287, 1.913, 1.996),
    ("spfhp", 4): (4.294, 1.803, 1.880),
    ("spfhp", 8): (4.481, 1.895, 1.979),
    ("spfhp", "max"): (4.477, 1.905, 1.993),
}
PRINTED[DEFAULT_ALGORITHM, 3] = PRINTED["nnlshp", 3]  # the same factor, to a thousandth part


@dataclasses.dataclass(frozen=True)
class SpeedUpConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    histogram: str = setting(
        "", f"lengths of the sequences: a name that the package has, or a JSON file; empty = {HISTOGRAM}"
    )
    input_file: str = setting("", "unpacked TFRecords to take the lengths from instead; paths or globs")
    max_seq_length: int = setting(512, "tokens of a pack and of a row; longer sequences are cut", minimum=16)
    max_sequences_per_pack: int | str = setting(3, 'most sequences in a pack, or "max"', parse=parse_depth)
    algorithm: str = setting(DEFAULT_ALGORITHM, "that makes the plan", choices=ALGORITHM_NAMES)
    batch_size: int = setting(8, "packs, or rows, a step", minimum=1)
    micro_batch_size: int = setting(
        0, "packs, or rows, that ours computes at once; 0 = all of the step's", minimum=0
    )
    repeats: int = setting(21, "timed steps of each way", minimum=6)
    reference: bool = setting(
        False, "also measure transformers on torch (extra `reference`), and KerasHub where it is installed"
    )
    peak_gflops: float = setting(
        0.0,
        "10^9 operations a second that utilisation is a share of, a vendor's figure; 0 = measured in this "
        "run, by a float32 matrix product",
        minimum=0,
    )
    random_seed: int = setting(0, "of the packs that are timed", minimum=0)
    json: str = setting("", "also write all tables to this file")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "batch_size")
        if self.histogram and self.input_file:
            raise InputError(
                f"`histogram` must be left out with input_file={self.input_file}. Received: {self.histogram}."
            )
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)

    @property
    def histogram_name(self):
        """Of the histogram, or "" for records."""
        return self.histogram or ("" if self.input_file else HISTOGRAM)


def main(config):
    """Measure, print and write."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks import speed_up_measurement, training_ways
    from benchmarks.this_machine import cpu_name
    from bert_packed.config import load_model_config
    from bert_packed.runs.interleaved_timing import time_interleaved
    from bert_packed.runs.step_cost import measured_flops_per_second

    model_config = load_model_config(config.bert_config_file)
    data = speed_up_measurement.make_data(config, model_config)
    ways = speed_up_measurement.make_ways(
        training_ways.our_engines(model_config, config.micro_batch_size or None), data
    )
    # Before the steps, and again after them: a busy moment halves it
    peak = 1e9 * config.peak_gflops or measured_flops_per_second()
    with contextlib.ExitStack() as stack:
        if config.reference:
            ways |= stack.enter_context(speed_up_measurement.peers(model_config, data))
        seconds = time_interleaved(ways, config.repeats)
    if not config.peak_gflops:
        peak = max(peak, measured_flops_per_second())
    tables = {
        "data": [data.describe()],
        "steps": speed_up_measurement.step_rows(seconds, data, model_config, config.batch_size, peak),
        "packing": speed_up_measurement.ratio_rows(seconds, data, printed_of(config), ASKED),
    }
    about = f"CPU: {cpu_name()}; backend {backend}; {config.bert_config_file}"
    given = "given" if config.peak_gflops else "measured"
    print(f"{about}; utilisation of {peak / 1e9:,.1f} GFLOP/s, {given}")
    for name, rows in tables.items():
        print(f"\n{name}")
        print_table(rows)
    if config.json:
        write_json(config.json, {"about": about, "peak_flops": peak, **tables})


def printed_of(config):
    """What the paper prints beside this run, by name: dict, empty where it has no such data."""
    found = PRINTED.get((config.algorithm, config.max_sequences_per_pack))
    if config.histogram_name != HISTOGRAM or config.max_seq_length != 512 or not found:
        return {}
    overhead, realised, factor = found
    return {"overhead": overhead, "realised": realised, "share": realised / factor}


if __name__ == "__main__":
    sys.exit(run(main, SpeedUpConfig, DESCRIPTION))
