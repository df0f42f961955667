"""Command line: learning curves packed and unpacked, seeds as bands, from runs that it takes or goes on with.

python -m benchmarks.learning_curves --packed_file='packed/*' --unpacked_file='unpacked/*' \
    --eval_file='held_out/*' --output_dir=runs/curves
"""

import dataclasses
import sys
from pathlib import Path

from benchmarks.curve_runs import SETS, VARIANTS, add_kept, make_runs
from benchmarks.kept_runs import comparable
from benchmarks.paired_data import check_data, read_packing_factor
from benchmarks.planned_runs import parse_names, parse_seeds, settings_of
from benchmarks.taken_runs import print_commands, take_all
from bert_packed.core.command_line import print_table, run
from bert_packed.core.output_files import write_json
from bert_packed.core.settings import InputError, check_divides, check_settings, setting
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Figures 3 and 4 of "Efficient Sequence Packing without Cross-contamination" and its further learning curves: a
set of runs of run_pretraining.py that see as many sequences each, one after the other, in OUTPUT_DIR.

The same command, after a kill, goes on with the run that stands half done, and leaves out those that are
complete. SIGTERM and Ctrl-C save at the next step and stop. After each run, and however it ends, it writes
curves.csv and a PNG for each set, at last a table of what the runs have come to: of whatever runs of these
sets are there, of all seeds and variants. Those made under other flags, or on files that changed since, are
named and left out.
"""


def parse_sets(text):
    """`--sets`: keys of `SETS` with commas."""
    return parse_names(text, SETS)


def parse_variants(text):
    """`--only`: variants with commas, or nothing."""
    return parse_names(text, VARIANTS) if text else text


@dataclasses.dataclass(frozen=True)
class CurvesConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    packed_file: str = setting("", "packed training TFRecords: comma-separated paths or globs")
    unpacked_file: str = setting("", "the same sequences packed at depth 1")
    eval_file: str = setting(
        "", "held-out TFRecords for all runs; at depth 1 an ablation shows what was learnt, not what it reads"
    )
    output_dir: str = setting("", "where the runs, their logs, curves.csv and the pictures go")
    sets: str = setting(
        "same_sequences",
        "; ".join(f"{name}: {', '.join(variants)}" for name, variants in SETS.items()),
        parse=parse_sets,
    )
    only: str = setting("", "of the sets, take these variants alone; empty = all", parse=parse_variants)
    seeds: str = setting("1,2,3", "of the runs of a variant to take, comma-separated", parse=parse_seeds)
    bert_config_file: str = setting("bert-tiny", "size, or bert_config.json, of the model")
    num_sequences: int = setting(500_000, "sequences that each run sees", minimum=1)
    sequences_per_step: int = setting(64, "sequences per update of the unpacked run", minimum=1)
    micro_batch_size: int = setting(0, "packs computed at once; 0 = all of a step's", minimum=0)
    learning_rate: float = setting(5e-3, "peak learning rate", minimum=0)
    warmup_share: float = setting(0.1, "share of the steps that warm up", minimum=0, maximum=1)
    beta_1: float = setting(0.9, "LAMB's decay of momentum", minimum=0, maximum=0.999999)
    beta_2: float = setting(0.999, "LAMB's decay of velocity", minimum=0, maximum=0.9999999)
    num_points: int = setting(50, "most rows of each log, evaluations and checkpoints of a run", minimum=1)
    max_eval_steps: int = setting(0, "evaluation batches of 8 packs; 0 = all of the held-out data", minimum=0)
    run_flags: str = setting("", "more flags of run_pretraining.py for every run, as one text")
    target_accuracy: float = setting(
        0.0,
        "held-out masked-LM accuracy whose cost is told; 0 = 0.95 of what all complete packed and unpacked "
        "runs reach",
        minimum=0,
        maximum=1,
    )
    draw_only: bool = setting(False, "take no step: only write, from what is there")
    print_commands: bool = setting(False, "only print the command of each run")
    json: str = setting("", "also write the table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        for name in ("packed_file", "unpacked_file", "eval_file", "output_dir"):
            if not getattr(self, name):
                raise InputError(f"`{name}` must be given. Received: nothing.")
        if not self.variants:
            raise InputError(f"`only` must be of `sets`={self.sets}. Received: {self.only}.")
        check_divides(self, "micro_batch_size", "sequences_per_step")

    @property
    def all_variants(self):
        """Names of the variants of the sets, in order."""
        return list(dict.fromkeys(variant for name in self.sets.split(",") for variant in SETS[name]))

    @property
    def variants(self):
        """Names of the variants to take, in order."""
        return [variant for variant in self.all_variants if not self.only or variant in self.only.split(",")]


def main(config):
    """Take the runs that are not complete, then draw; returns an exit status."""
    choose_backend()
    packing_factor = read_packing_factor(tell, **_files(config, "packed_file", "unpacked_file"))
    runs = make_runs(config, packing_factor)
    settings = settings_of(runs[0], config.output_dir)
    check_data(settings, **_files(config, "packed_file", "unpacked_file", "eval_file"))
    if config.print_commands:
        return print_commands(runs, config.output_dir)
    drawn = comparable(add_kept(runs, config, packing_factor), config.output_dir, tell)
    status = 0
    try:
        if not config.draw_only:
            status = take_all(runs, config.output_dir, lambda: write_all(config, drawn))
    finally:
        rows = write_all(config, drawn)
    print_table(rows)
    return status


def tell(line):
    """Print a line beside the table."""
    print(line, file=sys.stderr)


def _files(config, *names):
    return {name: getattr(config, name) for name in names}


def write_all(config, runs):
    """Write curves.csv, pictures and table of what there is; returns the rows of the table."""
    from benchmarks import curve_picture, curve_tables

    folder = Path(config.output_dir)
    points = curve_tables.read_points(runs, folder)
    target = config.target_accuracy or curve_tables.common_target(runs, points)
    rows = curve_tables.summary_rows(runs, points, target)
    folder.mkdir(parents=True, exist_ok=True)
    curve_tables.write_points(folder / "curves.csv", points)
    for name in config.sets.split(","):
        curve_picture.draw(points, SETS[name], folder / f"{name}.png")
    if config.json:
        write_json(config.json, {"target accuracy": target, "runs": rows})
    return rows


if __name__ == "__main__":
    sys.exit(run(main, CurvesConfig, DESCRIPTION))
