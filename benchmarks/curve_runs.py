"""Which runs the learning curves are made of: variants of one pre-training, each a set of its flags.

Section 4.2 of "Efficient Sequence Packing without Cross-contamination". With p sequences a pack, batch b:

    variant               data        batch       betas    learning rate    stands for
    unpacked              unpacked    b           as set   as set           the baseline
    packed                packed      b / p       as set   as set           equal sequences per update
    packed_same_batch     packed      b           as set   as set           p times the sequences per update
    packed_betas          packed      b           ^p       as set           ... corrected by the betas
    packed_learning_rate  packed      b           as set   x p              ... corrected by the learning rate
    unpacked_twice        unpacked    2 b         ^2       as set           the same without packs, if p = 2

and the ablations, which are `packed` with one of `run_pretraining.py --ablation`. All see as many sequences.
"""

import re
from pathlib import Path

from benchmarks.planned_runs import divide_evenly, plan_pretraining, seeds_of
from bert_packed.config import ABLATIONS

UNPACKED, PACKED = "unpacked", "packed"
SETS = {
    "same_sequences": (UNPACKED, PACKED),
    "same_batch": (UNPACKED, "packed_same_batch", "packed_betas", "packed_learning_rate", "unpacked_twice"),
    "ablations": (PACKED, *ABLATIONS),
}
VARIANTS = tuple(dict.fromkeys(variant for variants in SETS.values() for variant in variants))


def make_runs(config, packing_factor):
    """The runs of a config, seed after seed: the first curves are whole before the second begin.

    Args:
        config: `learning_curves.CurvesConfig`.
        packing_factor: p of its packed data.

    Returns:
        List of `planned_runs.Run`.

    Raises:
        InputError: no batch of packs holds as many sequences as are asked for.
    """
    return [
        _make_run(config, variant, seed, packing_factor)
        for seed in seeds_of(config.seeds)
        for variant in config.variants
    ]


def add_kept(runs, config, packing_factor):
    """Those runs and, of the sets that are asked for, all others whose folders are there: whole curves.

    Args:
        runs: Of `make_runs`.
        config, packing_factor: As there.

    Returns:
        List of `planned_runs.Run`, seed after seed.
    """
    folder = Path(config.output_dir)
    kept = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    names = kept | {run.name for run in runs}
    found = {re.fullmatch(r".*-seed(\d+)", name) for name in names} - {None}
    return [
        _make_run(config, variant, seed, packing_factor)
        for seed in sorted({int(match[1]) for match in found})
        for variant in config.all_variants
        if f"{variant}-seed{seed}" in names
    ]


def _make_run(config, variant, seed, packing_factor):
    is_packed = not variant.startswith(UNPACKED)
    flags = {
        "input_file": config.packed_file if is_packed else config.unpacked_file,
        "eval_input_file": config.eval_file,
        "train_batch_size": config.sequences_per_step,
        "learning_rate": config.learning_rate,
        "beta_1": config.beta_1,
        "beta_2": config.beta_2,
        "packing_correction": "betas" if variant == "packed_betas" else "none",
        "ablation": variant if variant in ABLATIONS else "",
    }
    if variant == "packed_learning_rate":
        flags["learning_rate"] *= packing_factor
    elif variant == "unpacked_twice":
        flags |= {"train_batch_size": 2 * config.sequences_per_step}
        flags |= {name: flags[name] ** 2 for name in ("beta_1", "beta_2")}
    elif variant == PACKED or variant in ABLATIONS:
        flags = divide_evenly(flags, packing_factor, config, "sequences_per_step")
    per_pack = packing_factor if is_packed else 1.0
    return plan_pretraining(config, variant, seed, config.num_sequences, flags, per_pack, "run_flags")
