"""Which runs a pre-training in two phases has, what starts from what, and the table of them."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.full_pretraining import FILES, FullConfig
from benchmarks.planned_runs import settings_of
from benchmarks.pretraining_scores import summary_rows
from benchmarks.pretraining_stages import make_runs

GIVEN = {name: name for name in FILES} | {"output_dir": "o"}
FACTORS = {"phase1": 2.0, "phase2": 4.0}


def made(**changes):
    """Dict from name to the settings that a run's command line means."""
    return {one.name: settings_of(one, "o") for one in make_runs(FullConfig(**GIVEN, **changes), FACTORS)}


@pytest.fixture(autouse=True)
def named_files(monkeypatch, tmp_path):
    """Work where the files that `GIVEN` names are: flags of fine-tuning are checked against the disk."""
    monkeypatch.chdir(tmp_path)
    for name in ("train_file", "predict_file", "vocab_file"):
        (tmp_path / name).touch()


def test_each_run_starts_from_the_one_before_it(tmp_path):
    runs = made(pretraining_seeds="4,5", seeds="1,2")
    starts = {name: config.init_checkpoint for name, config in runs.items()}
    assert starts == {
        f"{name}{ending}": start and f"{tmp_path}/o/{start}"
        for kind in ("packed", "unpacked")
        for seed in "45"
        for name, ending, start in (
            (f"phase1-{kind}", f"-seed{seed}", ""),
            (f"phase2-{kind}", f"-seed{seed}", f"phase1-{kind}-seed{seed}"),
            (f"squad-{kind}{seed}", "-seed1", f"phase2-{kind}-seed{seed}"),
            (f"squad-{kind}{seed}", "-seed2", f"phase2-{kind}-seed{seed}"),
        )
    } | {"squad-random-seed1": "", "squad-random-seed2": ""}
    names = list(runs)
    for name, start in starts.items():
        assert not start or names.index(Path(start).name) < names.index(name)
        assert runs[name].random_seed == int(name[-1])
    assert list(made(only="random,packed", seeds="3")) == [
        *("phase1-packed-seed1", "phase2-packed-seed1", "squad-packed1-seed3", "squad-random-seed3")
    ]


def test_phases_see_their_data_and_as_many_sequences_in_each_update():
    runs = made(
        phase1_sequences=6400,
        phase2_sequences=800,
        phase1_batch_size=64,
        phase2_batch_size=16,
        phase1_learning_rate=0.5,
        phase2_learning_rate=0.25,
        micro_batch_size=2,
        warmup_share=0.2,
        num_points=5,
        max_eval_steps=7,
        bert_config_file="bert-tiny",
        pretraining_flags="--weight_decay=0.3",
    )
    for phase, steps, rate, unpacked, packed in (("phase1", 100, 0.5, 64, 32), ("phase2", 50, 0.25, 16, 4)):
        for kind, batch in (("packed", packed), ("unpacked", unpacked)):
            config = runs[f"{phase}-{kind}-seed1"]
            assert (config.input_file, config.eval_input_file) == (f"{phase}_{kind}", f"{phase}_eval")
            assert (config.train_batch_size, config.micro_batch_size) == (batch, 2)
            assert (config.num_train_steps, config.num_warmup_steps) == (steps, steps // 5)
            assert (config.eval_steps, config.log_steps, config.save_checkpoints_steps) == (steps // 5,) * 3
            assert (config.learning_rate, config.weight_decay, config.max_eval_steps) == (rate, 0.3, 7)
            assert config.bert_config_file == "bert-tiny"


def test_fine_tunings_differ_only_in_where_they_start_and_in_their_seed():
    runs = {name: one for name, one in made(bert_config_file="bert-tiny").items() if "squad" in name}
    assert len(runs) == 9
    first = runs["squad-packed1-seed1"]
    assert (first.train_file, first.predict_file, first.vocab_file) == (
        *("train_file", "predict_file", "vocab_file"),
    )
    assert (first.max_sequences_per_pack, first.train_batch_size, first.num_train_epochs) == (1, 16, 2.0)
    for name, config in runs.items():
        same = dataclasses.replace(
            config,
            output_dir=first.output_dir,
            random_seed=first.random_seed,
            init_checkpoint=first.init_checkpoint,
            bert_config_file=first.bert_config_file,
        )
        assert same == first
        # The shape is the checkpoint's; only a random model needs to be told
        assert config.bert_config_file == ("bert-tiny" if "random" in name else "")
    depth = made(finetuning_depth="max", finetuning_flags="--num_train_epochs=7")["squad-random-seed2"]
    assert (depth.max_sequences_per_pack, depth.num_train_epochs) == ("max", 7.0)


def test_the_table_has_medians_over_seeds_of_what_is_there():
    runs = make_runs(FullConfig(**GIVEN, pretraining_seeds="1,2"), FACTORS)

    def point(variant, seed, data, accuracy, hours=None, sequences=90.0):
        return {
            "variant": variant,
            "seed": seed,
            "data": data,
            "mlm_accuracy": accuracy,
            "hours": hours,
            "sequences": sequences,
        }

    points = [
        point("phase1-packed", 1, "eval", 0.1, sequences=45.0),
        point("phase1-packed", 1, "eval", 0.3),
        point("phase1-packed", 2, "eval", 0.5),
        point("phase1-packed", 3, "eval", 0.9, sequences=45.0),  # has not come as far
        point("phase1-packed", 1, "train", 0.9, 2.0),
        point("phase1-packed", 2, "train", 0.9, 3.0),
        point("phase2-packed", 1, "eval", 0.7),
        point("phase2-unpacked", 1, "eval", 0.7, sequences=45.0),
        point("phase2-unpacked", 2, "eval", 0.8, sequences=90.0),
        point("phase1-unpacked", 1, "eval", 0.2),
    ]
    scores = {
        f"squad-{name}": {"f1": f1, "exact_match": f1 / 2}
        for name, f1 in (
            *(("packed1-seed1", 10.0), ("packed1-seed2", 30.0), ("packed2-seed1", 80.0)),
            *(("unpacked1-seed1", 4.0), ("random-seed3", 6.0)),
        )
    }
    packed, unpacked, random = summary_rows(runs, points, scores)
    assert [row["pre-training"] for row in (packed, unpacked, random)] == ["packed", "unpacked", "random"]
    assert packed["phase1 held-out accuracy"] == pytest.approx(0.4)
    assert packed["phase1 hours"] == pytest.approx(2.5) and packed["phase2 hours"] is None
    assert packed["phase1 sequences"] == 90 and packed["phase2 held-out accuracy"] == 0.7
    assert (packed["F1, median"], packed["F1, least"], packed["F1, most"]) == (30, 10, 80)
    assert (packed["exact match, median"], packed["exact match, most"]) == (15, 40)
    assert packed["fine-tunings"] == 3 and unpacked["fine-tunings"] == random["fine-tunings"] == 1
    assert unpacked["phase1 held-out accuracy"] == 0.2 and unpacked["F1, median"] == 4
    assert [packed[f"{phase} seeds"] for phase in ("phase1", "phase2")] == [2, 1]
    assert (unpacked["phase2 held-out accuracy"], unpacked["phase2 seeds"]) == (0.8, 1)
    assert random["phase1 held-out accuracy"] is None and random["F1, median"] == 6
