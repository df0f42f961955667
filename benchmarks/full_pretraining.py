"""Command line: both phases of pre-training, packed and unpacked, then SQuAD with several seeds, in small.

python -m benchmarks.full_pretraining --phase1_packed='p1/*' --phase1_unpacked='u1/*' \
    --phase1_eval='e1/*' --phase2_packed='p2/*' --phase2_unpacked='u2/*' --phase2_eval='e2/*' \
    --train_file=train.json --predict_file=dev.json --vocab_file=vocab.txt --output_dir=runs/full
"""

import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.kept_runs import comparable, is_complete
from benchmarks.paired_data import read_packing_factor
from benchmarks.planned_runs import SQUAD, parse_names, parse_seeds
from benchmarks.pretraining_scores import summary_rows
from benchmarks.pretraining_stages import KINDS, PHASES, make_runs
from benchmarks.stage_inputs import check_inputs
from benchmarks.taken_runs import print_commands, take_all
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_divides, check_settings, parse_depth, setting
from bert_packed.training.engines import choose_backend

DESCRIPTION = """
Table 3 of "Efficient Sequence Packing without Cross-contamination", in small: a set of runs of
run_pretraining.py, phase 1 and from it phase 2, on packs and on the same sequences unpacked, as many in each
update; then runs of run_squad.py from both, and from random weights, which tells what pre-training gave.

The same command, after a kill, goes on with the run that stands half done, and leaves out those that are
complete. The table is of whatever is there; runs made under other flags, or on files that changed since, are
named and left out.
"""
FILES = (
    *(f"{phase}_{name}" for phase in PHASES for name in ("packed", "unpacked", "eval")),
    *("train_file", "predict_file", "vocab_file", "output_dir"),
)


def parse_kinds(text):
    """`--only`: of `KINDS`, with commas."""
    return parse_names(text, KINDS)


@dataclasses.dataclass(frozen=True)
class FullConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    phase1_packed: str = setting("", "packed training TFRecords of phase 1, comma-separated paths or globs")
    phase1_unpacked: str = setting("", "the same sequences packed at depth 1")
    phase1_eval: str = setting("", "held-out TFRecords of phase 1")
    phase2_packed: str = setting("", "of phase 2, whose sequences are longer")
    phase2_unpacked: str = setting("", "the same sequences packed at depth 1")
    phase2_eval: str = setting("", "held-out TFRecords of phase 2")
    train_file: str = setting("", "SQuAD JSON to fine-tune on")
    predict_file: str = setting("", "SQuAD JSON to answer, with the answers")
    vocab_file: str = setting("", "WordPieces that the TFRecords were made with")
    output_dir: str = setting("", "where the runs and their logs go")
    only: str = setting(",".join(KINDS), "of these kinds of pre-training", parse=parse_kinds)
    pretraining_seeds: str = setting("1", "of pre-trainings of a kind, comma-separated", parse=parse_seeds)
    seeds: str = setting("1,2,3", "of fine-tunings from each, comma-separated", parse=parse_seeds)
    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    phase1_sequences: int = setting(60_000, "sequences that phase 1 sees", minimum=1)
    phase2_sequences: int = setting(6_000, "sequences that phase 2 sees", minimum=1)
    phase1_batch_size: int = setting(64, "sequences per update of phase 1", minimum=1)
    phase2_batch_size: int = setting(32, "sequences per update of phase 2", minimum=1)
    phase1_learning_rate: float = setting(8e-3, "peak learning rate of phase 1", minimum=0)
    phase2_learning_rate: float = setting(4e-3, "peak learning rate of phase 2", minimum=0)
    micro_batch_size: int = setting(0, "packs computed at once in a phase; 0 = all of a step's", minimum=0)
    warmup_share: float = setting(0.1, "share of a phase's steps that warm up", minimum=0, maximum=1)
    num_points: int = setting(10, "most rows of each log, evaluations and checkpoints of a phase", minimum=1)
    max_eval_steps: int = setting(0, "evaluation batches of 8 packs; 0 = all of the held-out data", minimum=0)
    finetuning_depth: int | str = setting(
        1,
        "most sequences in a pack of fine-tuning; 1 = unpacked, as in the paper, or max",
        parse=parse_depth,
    )
    pretraining_flags: str = setting("", "more flags of run_pretraining.py for each run, as one text")
    finetuning_flags: str = setting(
        "--train_batch_size=16 --num_train_epochs=2 --learning_rate=3e-4",
        "more flags of run_squad.py for each run, as one text",
    )
    table_only: bool = setting(False, "take no step: only tell what is there")
    print_commands: bool = setting(False, "only print the command of each run")
    json: str = setting("", "also write the table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        for name in FILES:
            if not getattr(self, name):
                raise InputError(f"`{name}` must be given. Received: nothing.")
        for name in ("phase1_batch_size", "phase2_batch_size"):
            check_divides(self, "micro_batch_size", name)

    @property
    def all_kinds(self):
        """List of `KINDS`, in order."""
        return [kind for kind in KINDS if kind in self.only.split(",")]


def main(config):
    """Take the runs that are not complete, then print the table; returns an exit status."""
    choose_backend()
    factors = {}
    for phase in PHASES:
        files = {name: getattr(config, name) for name in (f"{phase}_packed", f"{phase}_unpacked")}
        factors[phase] = read_packing_factor(tell, **files)
    runs = make_runs(config, factors)
    check_inputs(config, factors)
    if config.print_commands:
        return print_commands(runs, config.output_dir)
    status = 0 if config.table_only else take_all(runs, config.output_dir)
    print_table(read_rows(config, runs), config.json)
    return status


def tell(line):
    """Print a line beside the table."""
    print(line, file=sys.stderr)


def read_rows(config, runs):
    """Rows of the table, of whatever is there under these flags."""
    from benchmarks.curve_tables import read_points
    from bert_packed.runs.run_directory import SCORES_FILE

    folder = Path(config.output_dir)
    found = comparable(runs, folder, tell)
    scores = {
        one.name: json.loads((folder / one.name / SCORES_FILE).read_text())
        for one in found
        if one.program == SQUAD and is_complete(one, folder)
    }
    return summary_rows(runs, read_points([one for one in found if one.program != SQUAD], folder), scores)


if __name__ == "__main__":
    sys.exit(run(main, FullConfig, DESCRIPTION))
