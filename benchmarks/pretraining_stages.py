"""Which runs a pre-training in two phases is made of, packed and unpacked, with its fine-tunings.

Section 4.3 of "Efficient Sequence Packing without Cross-contamination". Each arrow is `--init_checkpoint`:

    phase1-packed-seed1     ->  phase2-packed-seed1     ->  squad-packed1-seed1, squad-packed1-seed2, ...
    phase1-unpacked-seed1   ->  phase2-unpacked-seed1   ->  squad-unpacked1-seed1, ...
                                                            squad-random-seed1, ...: from random weights

A packed phase divides its batch by the packing factor p: an update sees as many sequences as unpacked.
"""

from pathlib import Path

from benchmarks.curve_runs import PACKED, UNPACKED
from benchmarks.planned_runs import SQUAD, Run, divide_evenly, plan_pretraining, seeds_of

RANDOM = "random"
KINDS = (PACKED, UNPACKED, RANDOM)
PHASES = ("phase1", "phase2")


def make_runs(config, packing_factors):
    """The runs of a config, each after the one that it starts from.

    Args:
        config: `full_pretraining.FullConfig`.
        packing_factors: Dict from phase to p of its packed data.

    Returns:
        List of `planned_runs.Run`. Paths to start from are absolute, however `output_dir` is given.

    Raises:
        InputError: no batch of packs holds as many sequences as are asked for.
    """
    runs = []
    for kind in config.all_kinds:
        if kind == RANDOM:
            runs += _finetuning_runs(config, RANDOM, "")
            continue
        for seed in seeds_of(config.pretraining_seeds):
            start = ""
            for phase in PHASES:
                runs.append(_phase_run(config, phase, kind, seed, packing_factors[phase], start))
                start = str(Path(config.output_dir).resolve() / runs[-1].name)
            runs += _finetuning_runs(config, f"{kind}{seed}", start)
    return runs


def _phase_run(config, phase, kind, seed, packing_factor, start):
    def given(name):
        return getattr(config, f"{phase}_{name}")

    flags = {
        "input_file": given(kind),
        "eval_input_file": given("eval"),
        "init_checkpoint": start,
        "train_batch_size": given("batch_size"),
        "learning_rate": given("learning_rate"),
        "packing_correction": "none",
        "ablation": "",
    }
    per_pack = 1.0
    if kind == PACKED:
        per_pack = packing_factor
        flags = divide_evenly(flags, packing_factor, config, f"{phase}_batch_size")
    return plan_pretraining(
        config, f"{phase}-{kind}", seed, given("sequences"), flags, per_pack, "pretraining_flags"
    )


def _finetuning_runs(config, name, start):
    return [
        Run(
            f"squad-{name}",
            seed,
            {
                "train_file": config.train_file,
                "predict_file": config.predict_file,
                "vocab_file": config.vocab_file,
                "bert_config_file": "" if start else config.bert_config_file,
                "init_checkpoint": start,
                "max_sequences_per_pack": config.finetuning_depth,
                "random_seed": seed,
            },
            0.0,  # not told: it is the batch
            config.finetuning_flags,
            SQUAD,
            "finetuning_flags",
        )
        for seed in seeds_of(config.seeds)
    ]
