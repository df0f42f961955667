"""Which runs the learning curves are made of: variants of one pre-training, each a set of its flags.

Section 4.2 of "Efficient Sequence Packing without Cross-contamination". With p sequences a pack, batch b:

    variant               data        batch       betas    learning rate    stands for
    unpacked              unpacked    b           as set   as set           the baseline
    packed                packed      b / p       as set   as set           equal sequences per update
    packed_same_batch     packed      b           as set   as set           p times the sequences per update
    packed_betas          packed      b           ^p       as set           ... corrected by the betas
    packed_learning_rate  packed      b           as set   x p              ... corrected by the learning rate
    unpacked_twice        unpacked    2 b         ^2       as set           as many sequences without packs

and the ablations, which are `packed` with one of `run_pretraining.py --ablation`. All see as many sequences.
"""

from bert_packed.config import ABLATIONS
from bert_packed.reports.taken_runs import Run
from bert_packed.runs.recipes import divide_batch

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
        List of `Run`.
    """
    return [
        _make_run(config, variant, seed, packing_factor)
        for seed in config.all_seeds
        for variant in config.variants
    ]


def _make_run(config, variant, seed, packing_factor):
    is_packed = not variant.startswith(UNPACKED)
    flags = {
        "train_batch_size": config.sequences_per_step,
        "learning_rate": config.learning_rate,
        "beta_1": config.beta_1,
        "beta_2": config.beta_2,
    }
    if variant == "packed_betas":
        flags["packing_correction"] = "betas"
    elif variant == "packed_learning_rate":
        flags["learning_rate"] *= packing_factor
    elif variant == "unpacked_twice":
        flags |= {"train_batch_size": 2 * config.sequences_per_step}
        flags |= {name: flags[name] ** 2 for name in ("beta_1", "beta_2")}
    elif variant == PACKED or variant in ABLATIONS:
        flags = divide_batch(flags, packing_factor, config.micro_batch_size or 1)
    if variant in ABLATIONS:
        flags["ablation"] = variant
    per_step = flags["train_batch_size"] * (packing_factor if is_packed else 1.0)
    num_steps = max(1, round(config.num_sequences / per_step))
    points = max(1, num_steps // config.num_points)
    return Run(
        variant,
        seed,
        {
            "input_file": config.packed_file if is_packed else config.unpacked_file,
            "eval_input_file": config.eval_file,
            "bert_config_file": config.bert_config_file,
            "micro_batch_size": config.micro_batch_size,
            **flags,
            "num_train_steps": num_steps,
            "num_warmup_steps": round(config.warmup_share * num_steps),
            "random_seed": seed,
            "log_steps": points,
            "eval_steps": points,
            "max_eval_steps": config.max_eval_steps,
            "save_checkpoints_steps": points,
            "keep_checkpoint_max": 1,
        },
        per_step,
        config.run_flags,
    )
