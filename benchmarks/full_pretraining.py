"""Both phases of pre-training, packed and unpacked, then SQuAD with several seeds, in small.

python -m benchmarks.full_pretraining --phase1_packed='p1/*' --phase1_unpacked='u1/*' \
    --phase1_eval='e1/*' --phase2_packed='p2/*' --phase2_unpacked='u2/*' --phase2_eval='e2/*' \
    --train_file=train.json --predict_file=dev.json --vocab_file=vocab.txt --output_dir=runs/full
"""

import dataclasses
import statistics
import sys
from pathlib import Path

from benchmarks.run_curves import read_run, summary_rows
from benchmarks.runner import show
from benchmarks.sweep import (
    SQUAD,
    Run,
    SweepConfig,
    packs_of,
    parse_seeds,
    read_packing_factor,
    run_all,
    steps_for,
)
from bert_packed.core.command_line import run
from bert_packed.core.settings import parse_depth, setting
from bert_packed.core.storage import read_json
from bert_packed.training.engines import choose_backend

PACKED, UNPACKED, RANDOM = KINDS = ("packed", "unpacked", "random")
PHASES = ("phase1", "phase2")
SCORES = {"F1": "f1", "exact match": "exact_match"}
FIGURES = ["mlm_loss", "mlm_accuracy"]


@dataclasses.dataclass(frozen=True)
class FullConfig(SweepConfig):
    """Table 3 of "Efficient Sequence Packing without Cross-contamination" (Section 4.3), in small: runs of
    run_pretraining.py, phase 1 and from it phase 2, on packs and on the same sequences unpacked, with
    equal sequences in each update; then runs of run_squad.py from both, and from random weights, which
    shows what pre-training gave. Each arrow is --init_checkpoint:

        phase1-packed-seed1     ->  phase2-packed-seed1     ->  squad-packed1-seed1, squad-packed1-seed2, ...
        phase1-unpacked-seed1   ->  phase2-unpacked-seed1   ->  squad-unpacked1-seed1, ...
                                                                squad-random-seed1, ...: from random weights

    Ctrl-C saves at the next step and stops. The same command continues, after a kill too; a complete run
    takes some seconds. The flags of all runs are checked before the first.
    """

    phase1_packed: str = setting(
        "", "packed training TFRecords of phase 1, comma-separated paths or globs", required=True
    )
    phase1_unpacked: str = setting("", "the same sequences packed at depth 1", required=True)
    phase1_eval: str = setting("", "held-out TFRecords of phase 1", required=True)
    phase2_packed: str = setting("", "of phase 2, whose sequences are longer", required=True)
    phase2_unpacked: str = setting("", "the same sequences packed at depth 1", required=True)
    phase2_eval: str = setting("", "held-out TFRecords of phase 2", required=True)
    train_file: str = setting("", "SQuAD JSON to fine-tune on", required=True)
    predict_file: str = setting("", "SQuAD JSON to answer, with the answers", required=True)
    vocab_file: str = setting("", "WordPieces that the TFRecords were made with", required=True)
    pretraining_seeds: str = setting("1", "of pre-trainings of a kind, comma-separated", parse=parse_seeds)
    seeds: str = setting("1,2,3", "of fine-tunings from each, comma-separated", parse=parse_seeds)
    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    phase1_sequences: int = setting(60_000, "sequences that phase 1 sees", minimum=1)
    phase2_sequences: int = setting(6_000, "sequences that phase 2 sees", minimum=1)
    phase1_batch_size: int = setting(64, "sequences per update of phase 1", minimum=1)
    phase2_batch_size: int = setting(32, "sequences per update of phase 2", minimum=1)
    phase1_learning_rate: float = setting(8e-3, "peak learning rate of phase 1", minimum=0)
    phase2_learning_rate: float = setting(4e-3, "peak learning rate of phase 2", minimum=0)
    num_points: int = setting(10, "most rows of each log, evaluations and checkpoints of a phase", minimum=1)
    finetuning_depth: int | str = setting(
        1,
        "most sequences in a pack of fine-tuning; 1 = unpacked, as in the paper, or max",
        parse=parse_depth,
    )
    pretraining_flags: str = setting(
        "", "more flags of run_pretraining.py for each run, as one text", parse=str
    )
    finetuning_flags: str = setting(
        "--train_batch_size=16 --num_train_epochs=2 --learning_rate=3e-4",
        "more flags of run_squad.py for each run, as one text",
        parse=str,
    )


def main(config):
    """Take or continue the runs, then print and write; returns an exit status."""
    choose_backend()
    # Manifests are read before any run: a missing one is found now, and not after the first phase
    factors = {phase: read_packing_factor(config, f"{phase}_packed", f"{phase}_unpacked") for phase in PHASES}
    runs = make_runs(config, factors)
    status = run_all(runs, config)
    if status is not None:
        return status
    folder = Path(config.output_dir)
    logged = [read_run(folder / one.name, FIGURES) for one in runs if one.program != SQUAD]
    tables = {"pre-trainings": summary_rows(logged, FIGURES), "fine-tunings": score_rows(runs, folder)}
    return show("full_pretraining", config, tables)


def make_runs(config, packing_factors):
    """The runs of a config, each after the one that it starts from.

    Paths to start from are absolute, however `output_dir` is given.
    """
    runs = []
    for kind in (PACKED, UNPACKED):
        for seed in config.pretraining_seeds.split(","):
            start = ""
            for phase in PHASES:
                runs.append(_phase_run(config, phase, kind, int(seed), packing_factors[phase], start))
                start = str(Path(config.output_dir).resolve() / runs[-1].name)
            runs += _finetuning_runs(config, f"{kind}{seed}", start)
    return runs + _finetuning_runs(config, RANDOM, "")


def _phase_run(config, phase, kind, seed, packing_factor, start):
    given = {
        name: getattr(config, f"{phase}_{name}")
        for name in (kind, "eval", "batch_size", "learning_rate", "sequences")
    }
    batch_size, per_pack = given["batch_size"], 1.0
    if kind == PACKED:  # an update sees as many sequences as unpacked
        batch_size = packs_of(batch_size, packing_factor, f"{phase}_batch_size")
        per_pack = packing_factor
    flags = {
        "input_file": given[kind],
        "eval_input_file": given["eval"],
        "init_checkpoint": start,
        "bert_config_file": config.bert_config_file,
        "train_batch_size": batch_size,
        "learning_rate": given["learning_rate"],
        "max_eval_steps": config.max_eval_steps,
        "random_seed": seed,
        **steps_for(given["sequences"], batch_size * per_pack, config.num_points),
    }
    return Run(f"{phase}-{kind}-seed{seed}", flags, config.pretraining_flags)


def _finetuning_runs(config, name, start):
    flags = {
        "train_file": config.train_file,
        "predict_file": config.predict_file,
        "vocab_file": config.vocab_file,
        # The config is empty where the model comes with the checkpoint
        "bert_config_file": "" if start else config.bert_config_file,
        "init_checkpoint": start,
        "max_sequences_per_pack": config.finetuning_depth,
    }
    return [
        Run(f"squad-{name}-seed{seed}", flags | {"random_seed": int(seed)}, config.finetuning_flags, SQUAD)
        for seed in config.seeds.split(",")
    ]


def score_rows(runs, folder):
    """Scores of the fine-tunings from each kind of pre-training: rows of a table; `runs` are complete."""
    from bert_packed.runs.run_directory import SCORES_FILE  # Keras: only now

    rows = []
    for kind in KINDS:
        names = [one.name for one in runs if one.name.startswith(f"squad-{kind}")]
        scores = [read_json(folder / name / SCORES_FILE) for name in names]
        row = {"pre-training": kind, "fine-tunings": len(scores)}
        for title, key in SCORES.items():
            values = [one[key] for one in scores]
            row[f"{title}, median"] = statistics.median(values)
            row |= {f"{title}, least": min(values), f"{title}, most": max(values)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(run(main, FullConfig))
