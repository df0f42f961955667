"""Command line: what a training step is made of on this machine, and what each part is limited by.

python -m benchmarks.machine --bert_config_file=bert-mini --batch_size=8
"""

import dataclasses
import statistics
import sys
import tempfile

from bert_packed.core.command_line import print_table, run
from bert_packed.core.output_files import write_json
from bert_packed.core.settings import InputError, check_divides, check_settings, setting
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Measures this machine (matrix products, memory, exponentials), each part of a training step as a program of
its own, forward and backward, and whole steps, in alternating turns.

The table has for each part the milliseconds that it takes in a step, and the least that it could take by the
machine's rates: its products at the rate of the best product, its bytes at that of memory, its exponentials
at theirs, whichever is longest, and which of the three that is. The rate of exponentials is that of a program
of the backend's compiler, not of the processor: one CPU has another under TensorFlow than under JAX, and so
have the parts that they limit. In a whole step XLA joins neighbouring parts, which then need not write to
memory what the next one reads.
"""


@dataclasses.dataclass(frozen=True)
class MachineConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs a step", minimum=1)
    micro_batch_size: int = setting(
        0, "packs that the step computes at once, and so its parts; 0 = all of the step's", minimum=0
    )
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    max_sequences_per_pack: int = setting(3, "most sequences in a pack", minimum=1)
    repeats: int = setting(9, "timed runs of each part", minimum=1)
    reference: bool = setting(False, "also measure torch's products (extra `reference`), with memory kept")
    step_only: bool = setting(False, "measure whole steps, and nothing else")
    json: str = setting("", "also write the tables to this file, as JSON")
    picture: str = setting("", "also draw them to this file, as PNG")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "batch_size")
        for name in ("picture", "reference"):
            value = getattr(self, name)
            if self.step_only and value:
                raise InputError(
                    f"`{name}` must not be set with --step_only, which measures neither parts nor rates. "
                    f"Received: {value}."
                )


def main(config):
    """Measure, print and draw."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks import machine_picture
    from benchmarks.step_parts import measure_step, part_rows, rate_rows
    from benchmarks.this_machine import cpu_name
    from bert_packed.config import load_model_config

    with tempfile.TemporaryDirectory() as folder:
        found = measure_step(config, load_model_config(config.bert_config_file), folder)
    tables = {"step": [step_row(backend, found.step)]}
    if not config.step_only:
        tables = {"rates": rate_rows(found), "parts": part_rows(found), **tables}
    print(f"CPU: {cpu_name()}")
    for name in tables:
        print()
        print_table(tables[name])
    if not config.step_only:
        products, step = found.product_bound(), statistics.median(found.step)
        print(
            f"\nproducts at the machine's best rate would take {products:.3f} s of the step's {step:.3f} s: "
            f"{products / step:.0%}"
        )
    if config.json:
        write_json(config.json, {"cpu": cpu_name(), **tables})
    if config.picture:
        machine_picture.draw(tables, found.rates, config.picture)


def step_row(backend, seconds):
    """The row of whole steps: backend, median, least and greatest seconds."""
    return {
        "backend": backend,
        "step, s": statistics.median(seconds),
        "least": min(seconds),
        "greatest": max(seconds),
        "steps": len(seconds),
    }


if __name__ == "__main__":
    sys.exit(run(main, MachineConfig, DESCRIPTION))
