"""Learning curves packed and unpacked, over sequences and hours, from runs that it takes or continues.

python -m benchmarks.learning_curves --packed_file='packed/*' --unpacked_file='unpacked/*' \
    --eval_file='held_out/*' --output_dir=runs/curves
"""

import dataclasses
import sys
from pathlib import Path

from benchmarks.run_curves import draw, read_run, summary_rows
from benchmarks.runner import parse_names, show
from benchmarks.sweep import Run, SweepConfig, packs_of, read_packing_factor, run_all, steps_for
from bert_packed.architectures.registry import ABLATIONS
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting
from bert_packed.training.engines import choose_backend

UNPACKED, PACKED = "unpacked", "packed"
SETS = {
    "same_sequences": (UNPACKED, PACKED),
    "same_batch": (UNPACKED, "packed_same_batch", "packed_betas", "packed_learning_rate", "unpacked_twice"),
    "ablations": (PACKED, *ABLATIONS),
}
BETAS = {"beta_1": 0.9, "beta_2": 0.999}
FIGURES = ["mlm_loss", "mlm_accuracy"]
PANELS = [("held out", "sequences"), ("held out", "hours")]  # more would be too small on a page


@dataclasses.dataclass(frozen=True)
class CurvesConfig(SweepConfig):
    """Figures 3 and 4 of "Efficient Sequence Packing without Cross-contamination" and its further learning
    curves: runs of run_pretraining.py that see the same number of sequences, one after the other, in
    OUTPUT_DIR. With p sequences a pack and batch b:

        variant               data        batch    betas    learning rate  is
        unpacked              unpacked    b        as set   as set         the baseline
        packed                packed      b / p    as set   as set         equal sequences per update
        packed_same_batch     packed      b        as set   as set         p times the sequences per update
        packed_betas          packed      b        ^p       as set         ... corrected by the betas
        packed_learning_rate  packed      b        as set   x p            ... corrected by the learning rate
        unpacked_twice        unpacked    2 b      ^2       as set         the same without packs, if p = 2

    and the ablations, which are `packed` with one of run_pretraining.py's --ablation. Ctrl-C saves at the
    next step and stops. The same command continues, after a kill too; a complete run takes some seconds.
    At the end it prints a table of all runs of the sets and seeds, and draws a PNG for each set;
    benchmarks.run_curves does so at any time.
    """

    packed_file: str = setting("", "packed training TFRecords: comma-separated paths or globs", required=True)
    unpacked_file: str = setting("", "the same sequences packed at depth 1", required=True)
    eval_file: str = setting(
        "",
        "held-out TFRecords for all runs; at depth 1 an ablation shows what was learned, not what it reads",
        required=True,
    )
    sets: str = setting(
        "same_sequences",
        "; ".join(f"{name}: {', '.join(variants)}" for name, variants in SETS.items()),
        parse=lambda text: parse_names(text, SETS),
    )
    bert_config_file: str = setting("bert-tiny", "size, or bert_config.json, of the model")
    num_sequences: int = setting(500_000, "sequences that each run sees", minimum=1)
    sequences_per_step: int = setting(64, "sequences per update of the unpacked run", minimum=1)
    learning_rate: float = setting(5e-3, "peak learning rate", minimum=0)
    num_points: int = setting(50, "most rows of each log, evaluations and checkpoints of a run", minimum=1)
    run_flags: str = setting("", "more flags of run_pretraining.py for every run, as one text", parse=str)


def main(config):
    """Take or continue the runs, then print, write and draw; returns an exit status."""
    choose_backend()
    runs = make_runs(config, read_packing_factor(config, "packed_file", "unpacked_file"))
    # The status is None when all runs are complete
    status = run_all(runs, config)
    if status is not None:
        return status
    folder = Path(config.output_dir)
    logged = [read_run(folder / one.name, FIGURES) for one in runs]
    show("learning_curves", config, {"runs": summary_rows(logged, FIGURES)})
    for name in config.sets.split(","):
        of_set = [one for variant in SETS[name] for one in logged if one.variant == variant]
        draw(of_set, FIGURES[:1], PANELS, folder / f"{name}.png")
    return 0


def make_runs(config, packing_factor):
    """The runs of a config, seed after seed: the first curves are whole before the second begin."""
    variants = dict.fromkeys(variant for name in config.sets.split(",") for variant in SETS[name])
    return [
        _make_run(config, variant, int(seed), packing_factor)
        for seed in config.seeds.split(",")
        for variant in variants
    ]


def _make_run(config, variant, seed, packing_factor):
    is_packed = not variant.startswith(UNPACKED)
    flags = {
        "input_file": config.packed_file if is_packed else config.unpacked_file,
        "eval_input_file": config.eval_file,
        "bert_config_file": config.bert_config_file,
        "train_batch_size": config.sequences_per_step,
        "learning_rate": config.learning_rate,
        **BETAS,
        "packing_correction": "betas" if variant == "packed_betas" else "none",
        "ablation": variant if variant in ABLATIONS else "",
        "max_eval_steps": config.max_eval_steps,
        "random_seed": seed,
    }
    if variant == "packed_learning_rate":
        flags["learning_rate"] *= packing_factor
    elif variant == "unpacked_twice":
        flags["train_batch_size"] *= 2
        flags |= {name: beta**2 for name, beta in BETAS.items()}
    elif variant == PACKED or variant in ABLATIONS:
        flags["train_batch_size"] = packs_of(config.sequences_per_step, packing_factor, "sequences_per_step")
    # Steps differ between variants, sequences do not
    per_step = flags["train_batch_size"] * (packing_factor if is_packed else 1.0)
    flags |= steps_for(config.num_sequences, per_step, config.num_points)
    return Run(f"{variant}-seed{seed}", flags, config.run_flags)


if __name__ == "__main__":
    sys.exit(run(main, CurvesConfig))
