"""Command line: how long each command takes before it works: until its help, and until it knows its input.

python -m benchmarks.start_up
"""

import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_settings, setting

DESCRIPTION = """
Starts each command of the package as a process of its own, with --help and with an input that does not exist,
and prints the seconds until it ends, by the clock and of processors: what stands between a command and its
first work, imports above all. An input that does not exist must end a command with exit status 2.
"""
MISSING = "there-is-no-such-file"
MISTAKE = 2  # exit status
# Arguments of Python, and flags; those without a value name an input that a command looks for, or an output
COMMANDS = {
    "create_pretraining_data": ("-m", "data_gen.create_pretraining_data", "--input_file", "--output_dir"),
    "pack_tfrecords": ("-m", "data_gen.pack_tfrecords", "--input_file", "--output_dir"),
    "verify_tfrecords": ("-m", "data_gen.verify_tfrecords", "--input_file", "--packed_file"),
    "find_sources": ("-m", "data_gen.find_sources", "--packed_file"),
    "run_pretraining": ("-m", "run_pretraining", "--input_file", "--output_dir"),
    "run_squad": ("-m", "run_squad", "--train_file", "--init_checkpoint", "--output_dir"),
    "finetune_glue": (
        *("-m", "bert_packed.finetune_glue"),
        *("--task_name=CoLA", "--data_dir", "--init_checkpoint", "--output_dir"),
    ),
    "finetune_ner": (
        *("-m", "bert_packed.finetune_ner"),
        *("--train_file", "--predict_file", "--init_checkpoint", "--output_dir"),
    ),
    "audit": ("-m", "bert_packed.audit", "--init_checkpoint", "--input_file"),
    "export": ("-m", "bert_packed.export", "--init_checkpoint", "--output_dir"),
    "squad_eval": ("-m", "bert_packed.squad_eval", "--data_file", "--prediction_file"),
}


@dataclasses.dataclass(frozen=True)
class StartConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    commands: str = setting("", "comma-separated names of commands; empty = all")
    repeats: int = setting(3, "starts of each, whose median counts", minimum=1)
    json: str = setting("", "also write the table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        unknown = set(self.names) - set(COMMANDS)
        if unknown:
            raise InputError(
                f"`commands` must be of {', '.join(COMMANDS)}. Received: {', '.join(sorted(unknown))}."
            )

    @property
    def names(self):
        """The commands asked for, in order."""
        return self.commands.split(",") if self.commands else list(COMMANDS)


def main(config):
    """Measure, and print the table."""
    from benchmarks.this_machine import cpu_name

    found = {name: {"--help": [], "missing input": []} for name in config.names}
    for _ in range(config.repeats):
        for name, ways in found.items():
            for way, times in ways.items():
                times.append(start(name, is_help=way == "--help"))
    rows = [
        {"command": name}
        | {
            f"{way}, {unit}": statistics.median(one[place] for one in times)
            for way, times in ways.items()
            for place, unit in enumerate(("s", "CPU s"))
        }
        for name, ways in found.items()
    ]
    print(f"CPU: {cpu_name()}")
    print_table(rows, config.json)


def start(name, is_help):
    """Start a command once.

    Args:
        name: Of `COMMANDS`.
        is_help: Whether with `--help`; else with inputs that do not exist.

    Returns:
        Seconds by the clock, and of processors.

    Raises:
        InputError: it did not end as it must.
    """
    module, flags = COMMANDS[name][:2], COMMANDS[name][2:]
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, MISSING)
        arguments = ["--help"] if is_help else [flag if "=" in flag else f"{flag}={target}" for flag in flags]
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        ended = subprocess.run([sys.executable, *module, *arguments], capture_output=True, text=True)
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    rule = "0" if is_help else f"{MISTAKE}, and name what is missing"
    if ended.returncode != (0 if is_help else MISTAKE) or not (is_help or target in ended.stderr):
        raise InputError(
            f"{name} must end with status {rule}. Received: {ended.returncode}, {ended.stderr.strip()[-200:]}"
        )
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(run(main, StartConfig, DESCRIPTION))
