"""Which runs learning curves are made of: variants, seeds, batches and flags, each as it is called."""

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks import planned_runs
from benchmarks.curve_runs import SETS, VARIANTS, make_runs
from benchmarks.learning_curves import CurvesConfig
from benchmarks.planned_runs import command_of
from bert_packed.core.command_line import parse
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
GIVEN = {"packed_file": "p", "unpacked_file": "u", "eval_file": "e", "output_dir": "o"}
ALL = {**GIVEN, "sets": ",".join(SETS)}


def settings_of(one):
    """The `TrainConfig` that a run's command line means."""
    return parse(TrainConfig, command_of(one, "o")[1:])


def test_each_variant_is_what_it_is_called():
    config = CurvesConfig(**ALL, seeds="7", sequences_per_step=60, num_sequences=6000, num_points=10)
    runs = {one.variant: one for one in make_runs(config, 2.5)}
    assert list(runs) == list(VARIANTS) and len(VARIANTS) == 10
    made = {name: settings_of(one) for name, one in runs.items()}
    base = made["unpacked"]
    assert (base.train_batch_size, base.num_train_steps, base.num_warmup_steps) == (60, 100, 10)
    assert (base.input_file, base.eval_input_file, base.output_dir) == ("u", "e", "o/unpacked-seed7")
    assert (base.eval_steps, base.log_steps, base.save_checkpoints_steps) == (10, 10, 10)

    def changes(name, of="unpacked"):
        old, new = dataclasses.asdict(made[of]), dataclasses.asdict(made[name])
        return {key: new[key] for key in new if new[key] != old[key] and key != "output_dir"}

    assert changes("packed") == {"input_file": "p", "train_batch_size": 24}
    fewer = {"num_train_steps": 40, "num_warmup_steps": 4}
    points = dict.fromkeys(("eval_steps", "log_steps", "save_checkpoints_steps"), 4)
    assert changes("packed_same_batch") == {"input_file": "p", **fewer, **points}
    assert changes("packed_betas", "packed_same_batch") == {"packing_correction": "betas"}
    assert changes("packed_learning_rate", "packed_same_batch") == {"learning_rate": 2.5 * 5e-3}
    half = {"num_train_steps": 50, "num_warmup_steps": 5}
    assert changes("unpacked_twice") == {
        "train_batch_size": 120,
        "beta_1": pytest.approx(0.81),
        "beta_2": pytest.approx(0.998001),
        **half,
        **dict.fromkeys(points, 5),
    }
    for name in SETS["ablations"][1:]:
        assert changes(name, "packed") == {"ablation": name}
    assert not any(made[name].ablation for name in made if name not in SETS["ablations"][1:])
    for name, one in runs.items():  # as many sequences for each
        assert one.sequences_per_step * made[name].num_train_steps == pytest.approx(6000)


def test_flags_of_all_runs_reach_each_of_them():
    given = {
        "bert_config_file": "bert-mini",
        "max_eval_steps": 7,
        "learning_rate": 0.5,
        "warmup_share": 0.25,
        "beta_1": 0.5,
        "beta_2": 0.75,
        "sequences_per_step": 60,
        "num_sequences": 6000,
    }
    runs = {one.variant: settings_of(one) for one in make_runs(CurvesConfig(**ALL, seeds="7", **given), 2.5)}
    assert len(runs) == len(VARIANTS)
    for name, made in runs.items():
        assert (made.bert_config_file, made.max_eval_steps) == ("bert-mini", 7)
        assert made.num_warmup_steps == made.num_train_steps // 4
        assert made.learning_rate == (1.25 if name == "packed_learning_rate" else 0.5)
        squared = (0.25, 0.5625) if name == "unpacked_twice" else (0.5, 0.75)
        assert (made.beta_1, made.beta_2) == squared
    assert (runs["unpacked_twice"].num_train_steps, runs["unpacked_twice"].num_warmup_steps) == (50, 12)


def test_batches_are_whole_micro_batches_and_their_steps_make_up_for_it():
    config = CurvesConfig(**GIVEN, seeds="1", sequences_per_step=64, micro_batch_size=4, num_sequences=64_000)
    unpacked, packed = (settings_of(one) for one in make_runs(config, 2.3))
    assert (unpacked.train_batch_size, packed.train_batch_size) == (64, 28)
    assert packed.num_train_steps == round(64_000 / 28 / 2.3) and packed.micro_batch_size == 4


@pytest.mark.parametrize(
    ("changes", "packing_factor", "message"),
    [
        (
            {"micro_batch_size": 32},
            3.0,
            "`micro_batch_size` must .* within 5% of sequences_per_step=64.* 96",
        ),
        ({"sequences_per_step": 4}, 2.5, "`sequences_per_step` must let .* 2 packs of 2.5 sequences hold 5"),
    ],
)
def test_updates_that_see_other_numbers_of_sequences_in_packs_are_refused(changes, packing_factor, message):
    config = CurvesConfig(**GIVEN, **{"sequences_per_step": 64, **changes})
    with pytest.raises(InputError, match=message):
        make_runs(config, packing_factor)
    assert make_runs(dataclasses.replace(config, only="unpacked"), packing_factor)


@pytest.mark.parametrize(("num_steps", "rows"), [(100, 10), (101, 10), (109, 10), (9, 9)])
def test_a_log_has_at_most_the_rows_that_are_asked_for(num_steps, rows):
    config = CurvesConfig(**GIVEN, sequences_per_step=10, num_sequences=10 * num_steps, num_points=10)
    made = settings_of(make_runs(config, 2.0)[0])
    assert made.num_train_steps == num_steps
    logged = {*range(made.log_steps, num_steps + 1, made.log_steps), num_steps}
    assert rows - 1 <= len(logged) <= rows
    assert made.eval_steps == made.save_checkpoints_steps == made.log_steps


def test_seed_comes_after_seed_and_more_flags_last():
    config = CurvesConfig(**GIVEN, seeds="3,5", only="packed,unpacked")
    more = "--masking=dynamic --vocab_file='my words.txt'"
    runs = make_runs(dataclasses.replace(config, run_flags=more), 2.0)
    assert [one.name for one in runs] == [
        "unpacked-seed3",
        "packed-seed3",
        "unpacked-seed5",
        "packed-seed5",
    ]
    assert [settings_of(one).random_seed for one in runs] == [3, 3, 5, 5]
    line = command_of(runs[0], "o")
    assert line[0] == sys.executable and Path(line[1]) == ROOT / "run_pretraining.py"
    assert line[-2:] == ["--masking=dynamic", "--vocab_file=my words.txt"]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("--output_dir=elsewhere", "output_dir"),
        ("--learning_rate=1", "learning_rate"),
        ("--ablation=no_position_reset", "ablation"),
        ("--packing_correction=betas", "packing_correction"),
        ("--overwrite", "overwrite"),
        ("--initial_batch_size=64 --batch_warmup_steps=4", "initial_batch_size"),
    ],
)
def test_more_flags_do_not_change_what_a_variant_is(more, name):
    one = make_runs(CurvesConfig(**GIVEN, run_flags=more), 2.0)[0]
    with pytest.raises(InputError, match=f"`run_flags` must leave {name} as it is for unpacked-seed1"):
        planned_runs.settings_of(one, "o")


def test_more_flags_that_no_shell_reads_are_told():
    one = make_runs(CurvesConfig(**GIVEN, run_flags="--vocab_file='x"), 2.0)[0]
    with pytest.raises(InputError, match=r"`run_flags` must be flags as in a shell.*No closing quotation"):
        planned_runs.settings_of(one, "o")
    one = make_runs(CurvesConfig(**GIVEN, run_flags="--objective=causal_lm"), 2.0)[0]
    with pytest.raises(InputError, match="`run_flags` must give an objective with masked tokens"):
        planned_runs.settings_of(one, "o")


def test_ablations_are_those_of_the_training_command():
    """Each is a variant by its own name, and one that `--ablation` takes."""
    names = ("no_attention_mask", "no_position_reset", "no_next_sentence", "separator_only")
    assert SETS["ablations"] == ("packed", *names)
    config = CurvesConfig(**GIVEN, sets="ablations", seeds="1")
    assert tuple(settings_of(one).ablation for one in make_runs(config, 2.0)) == ("", *names)
