"""Command line: where the time of a training step goes, instruction by instruction, as XLA compiled it.

python -m benchmarks.step_profile --bert_config_file=bert-mini --batch_size=8
"""

import collections
import dataclasses
import statistics
import sys
import tempfile
import time

from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import check_divides, check_settings, setting
from bert_packed.training.engines import choose_backend
from data_gen.jobs.runners import num_cores

DESCRIPTION = """
Traces training steps and adds up XLA's instructions by the part of the model that they belong to and by what
they do: products, sums, copies, or anything element by element. Prints for each group the milliseconds of a
step, the rate of its products, and at which rate the others read and write: beside what `machine` finds for
your machine's products and memory, this tells what to improve.

On a CPU, instructions that do not wait for one another run at the same time, such as the gradients of a
product's two factors. So the time of an instruction is what all threads spent on it, divided by the number of
cores; together they are the step, but for what cores waited. Rates are of all cores: what one of two cores
did alone reached half of the rate that it has here.

`machine` times each part as a program of its own; here is what is left of it in the step, where XLA joins
neighbours. Tracing slows a step, by up to a fifth: the last line has steps without it.
"""


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs a step", minimum=1)
    micro_batch_size: int = setting(0, "packs computed at once; 0 = all of the step's", minimum=0)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "most sequences in a pack", minimum=1)
    steps: int = setting(5, "traced steps, and as many without a trace", minimum=1)
    json: str = setting("", "also write the table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "batch_size")


def main(config):
    """Trace, and print the table."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks.benchmark_batches import make_batches
    from benchmarks.benchmark_engine import build_engine
    from benchmarks.instruction_groups import group_instructions
    from benchmarks.instruction_times import core_seconds, read_threads
    from benchmarks.this_machine import cpu_name
    from bert_packed.config import load_model_config
    from bert_packed.runs.interleaved_timing import time_interleaved
    from bert_packed.training.profiling import Profile

    model_config = load_model_config(config.bert_config_file)
    with tempfile.TemporaryDirectory() as folder:
        shape = config.max_seq_length, config.max_sequences_per_pack, config.batch_size
        packed, _ = make_batches(folder, "", *shape, 1, model_config)
        batch = packed.batches[0]
        engine = build_engine(model_config, micro_batch_size=config.micro_batch_size or config.batch_size)

        def step(_):
            float(engine.train_step(batch)["num_sequences"])  # wait for the device

        untraced = time_interleaved({"step": step}, config.steps)["step"]
        traced = []
        with Profile(folder, range(config.steps)) as profile:
            for number in range(config.steps):
                with profile.step(number):
                    start = time.perf_counter()
                    step(number)
                    traced.append(time.perf_counter() - start)
        (program,) = engine.step_programs(batch)
        groups = group_instructions(program.text)
        threads = read_threads(folder, set(groups))
    seconds = {name: spent / num_cores() for name, spent in core_seconds(threads).items()}
    print(f"CPU: {cpu_name()}, {num_cores()} cores, {backend}\n")
    print_table(profile_rows(groups, seconds, config.steps), config.json)
    print(f"\ntraced steps: {1e3 * statistics.mean(traced):.1f} ms, cores at instructions:", end=" ")
    print(f"{100 * sum(seconds.values()) / sum(traced):.0f} %")
    print(f"steps without a trace: {1e3 * statistics.median(untraced):.1f} ms")


def profile_rows(groups, seconds, num_steps):
    """Rows of the table, the longest first.

    Args:
        groups: As of `instruction_groups.group_instructions`.
        seconds: Dict from an instruction's name to its seconds in all steps, of all cores together.
        num_steps: Traced steps.

    Returns:
        List of dicts: `part`, `what`, `instructions`, `ms` of a step, `share` of all, `GFLOP/s` of products,
        `GB/s` of all else (None for what it is not of); the sums of each kind, and of all, last.
    """
    sums = collections.defaultdict(lambda: [0, 0.0, 0, 0])
    for name, spent in seconds.items():
        part, kind, flops, num_bytes = groups[name]
        for key in ((part, kind), ("all", kind), ("all", "")):
            for index, value in enumerate((1, spent / num_steps, flops, num_bytes)):
                sums[key][index] += value
    whole = sums["all", ""][1]
    rows = []
    for (part, kind), (number, spent, flops, num_bytes) in sums.items():
        rates = {
            "GFLOP/s": flops / spent / 1e9 if flops else None,
            "GB/s": None if flops else num_bytes / spent / 1e9,
        }
        row = {"part": part, "what": kind, "instructions": number}
        rows.append(row | {"ms": 1e3 * spent, "share": spent / whole} | rates)
    return sorted(rows, key=lambda row: (row["part"] == "all", row["what"] == "", -row["ms"]))


if __name__ == "__main__":
    sys.exit(run(main, ProfileConfig, DESCRIPTION))
