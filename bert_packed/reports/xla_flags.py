"""Command line: which of XLA's ways to compile for a CPU is the fastest for a training step on this machine.

python -m bert_packed.reports.xla_flags --bert_config_file=bert-mini --batch_size=8
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile

from bert_packed.reports.data_benchmark import cpu_name
from data_gen.cli.command_line import print_table, run
from data_gen.cli.settings import InputError, check_settings, setting

DEFAULT = "as it is"
# By name, what is added to XLA_FLAGS. Which of them a release knows differs: an unknown one ends the process
WAYS = {
    DEFAULT: "",
    "vectors of 512 bits": "--xla_cpu_prefer_vector_width=512",
    "no fusion emitters": "--xla_cpu_use_fusion_emitters=false",
    "oneDNN": "--xla_cpu_experimental_onednn_custom_call=true",
    "XNNPACK": "--xla_cpu_use_xnnpack=true",
    "YNNPACK for products alone": "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT",
}
DESCRIPTION = f"""
Measures training steps under several settings of XLA_FLAGS, each in a process of its own, as XLA reads them
once: round after round, every setting in turn. Prints for each the median of its steps and, by the medians
of a round, how many times as long they take as without any.

What is in XLA_FLAGS already holds for all. The settings: {", ".join(WAYS)}. Set the best one for your runs,
as `XLA_FLAGS=... python run_pretraining.py ...`.
"""


@dataclasses.dataclass(frozen=True)
class FlagsConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs a step", minimum=1)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    micro_batch_sizes: str = setting(
        "0", "comma-separated: packs computed at once, each with every setting; 0 = all of the step's"
    )
    steps: int = setting(8, "timed steps of each process", minimum=1)
    rounds: int = setting(3, "processes of each setting", minimum=1)
    json: str = setting("", "also write the table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if any(size < 0 or (size and self.batch_size % size) for size in self.sizes):
            raise InputError(
                "`micro_batch_sizes` must be 0 or divide `batch_size`. Received: micro_batch_sizes="
                f"{self.micro_batch_sizes}, batch_size={self.batch_size}."
            )

    @property
    def sizes(self):
        """`micro_batch_sizes` as numbers."""
        try:
            return [int(size) for size in self.micro_batch_sizes.split(",")]
        except ValueError:
            raise InputError(
                f"`micro_batch_sizes` must be whole numbers. Received: {self.micro_batch_sizes!r}."
            ) from None


def main(config):
    """Measure, and print the table."""
    ways = {(name, size): flags for size in config.sizes for name, flags in WAYS.items()}
    found = {way: [] for way in ways}
    for _ in range(config.rounds):
        for (name, size), flags in ways.items():
            found[name, size].append(_measure(config, flags, size))
    print(f"CPU: {cpu_name()}")
    print_table(flag_rows(found), config.json)


def flag_rows(found):
    """Rows of the table.

    Args:
        found: Dict from (name, micro-batch size) to a row of `machine.step_row` for each round, or None where
            the process did not end well. The first is the baseline.

    Returns:
        List of dicts: `XLA_FLAGS`, `micro_batch_size`, `step, s`, the median of the rounds' medians,
        `times as long` as the first, the median over the rounds, `from` and `to`, the least and the greatest.
        Without numbers where a setting ended a process.
    """
    baseline, rows = next(iter(found.values())), []
    for (name, size), rounds in found.items():
        row = {"XLA_FLAGS": name, "micro_batch_size": size}
        numbers = dict.fromkeys(("step, s", "times as long", "from", "to"))
        if all(rounds) and all(baseline):
            medians = [one["step, s"] for one in rounds]
            ratios = [one / other["step, s"] for one, other in zip(medians, baseline, strict=True)]
            numbers = {
                "step, s": statistics.median(medians),
                "times as long": statistics.median(ratios),
                "from": min(ratios),
                "to": max(ratios),
            }
        rows.append(row | numbers)
    return rows


def _measure(config, flags, micro_batch_size):
    """The row of `machine --step_only` under some flags; None where XLA does not know them.

    Raises:
        InputError: the step cannot be measured without any.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step.json")
        command = [
            *(sys.executable, "-m", "bert_packed.reports.machine", "--step_only"),
            f"--bert_config_file={config.bert_config_file}",
            f"--batch_size={config.batch_size}",
            f"--micro_batch_size={micro_batch_size}",
            f"--max_seq_length={config.max_seq_length}",
            f"--repeats={config.steps}",
            f"--json={path}",
        ]
        environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
        finished = subprocess.run(command, env=environment, capture_output=True, text=True)
        if finished.returncode:
            said = _last_words(finished)
            if not flags:  # then it is not the setting's fault
                mistake = said.partition("error: ")[2]
                raise InputError(mistake or f"a step must run without any of the settings. Received: {said}.")
            print(f"{flags}: {said}", file=sys.stderr)
            return None
        with open(path) as file:
            return json.load(file)["step"][0]


def _last_words(finished):
    """Why a process ended badly: its last line, and what the system says; no line where it was killed."""
    said, status = finished.stderr.strip().rpartition("\n")[2], finished.returncode
    how = f"killed by signal {-status}" if status < 0 else f"status {status}"
    if not said:
        return how
    return f"{said} ({how})" if status < 0 else said


if __name__ == "__main__":
    sys.exit(run(main, FlagsConfig, DESCRIPTION))
