"""Choices of `bert-packed train`: model, batch, memory, steps and vocabulary, by text, packs and machine."""

import types

import pytest

from bert_packed.architectures.registry import MODEL_SIZES, load_model_config
from bert_packed.checkpoints import starting_weights
from bert_packed.text_to_model import choices
from bert_packed.text_to_model.config import TrainConfig
from bert_packed.text_to_model.output_folder import OutputFolder

MANIFEST = {"packing_factor": 2.0, "num_sequences": 20_000, "num_packs": 10_000}


def config(**settings):
    return TrainConfig(**{"input_file": "text", "output_dir": "my", **settings})


def choose(platform="cpu", manifest=MANIFEST, folder="my", **settings):
    """`PretrainingConfig` for a platform, and why its settings are what they are."""
    place = OutputFolder(str(folder))
    training, chosen = choices.choose_training(config(**settings), manifest, place, platform)
    return training, {one.setting: one.why for one in chosen}


def steps_of(training, step_seconds=None, **settings):
    return choices.choose_steps(config(**settings), training, MANIFEST, step_seconds)


@pytest.mark.parametrize(
    ("packs", "most", "expected", "given"),
    [
        *((10, 4, (12, 4), 2), (8, 8, (8, 8), 8), (9, 8, (10, 5), 3)),
        *((1, 9, (1, 1), 1), (7, 1, (7, 1), 1), (131, 8, (136, 8), 1)),
    ],
)
def test_a_step_is_whole_micro_batches(packs, most, expected, given):
    assert choices.divide(packs, most, False) == expected
    assert choices.divide(packs, most, True) == (packs, given)
    # The same on each of three devices
    assert choices.divide(3 * packs - 2, most, False, 3) == tuple(3 * size for size in expected)
    assert choices.divide(3 * packs, most, True, 3) == (3 * packs, 3 * given)


def test_a_batch_counts_sequences_and_so_fewer_packs():
    training, _ = choose(num_train_epochs=100.0)
    assert training.train_batch_size == 104  # of 100 times 20,000 sequences / 10,000 steps / 2
    assert training.train_batch_size % training.micro_batch_size == 0
    assert steps_of(training)[1][0].why == "208 sequences at packing factor 2.00"
    # CPUs take 4,096 tokens at once, accelerators 65,536
    assert training.micro_batch_size == training.eval_batch_size == 8
    on_gpu, _ = choose("gpu", num_train_epochs=100.0)
    assert on_gpu.micro_batch_size == on_gpu.train_batch_size == 100
    assert choose(num_train_epochs=100.0, max_seq_length=128)[0].micro_batch_size == 25


@pytest.mark.parametrize(("num_sequences", "expected"), [(10, 32), (213_334, 64), (10**9, 256)])
def test_a_longer_training_has_larger_steps_within_limits(num_sequences, expected):
    manifest = {**MANIFEST, "packing_factor": 1.0, "num_sequences": num_sequences}
    assert choose(manifest=manifest)[0].train_batch_size == expected


@pytest.mark.parametrize(("hours", "packs", "steps"), [(0.1, 16, 450), (5.0, 40, 9000), (100.0, 128, 56250)])
def test_hours_choose_steps_and_their_packs_from_the_time_of_one(hours, packs, steps):
    """0.05 s a pack leave time for 7,200, 360,000 and 7,200,000 packs of two sequences."""
    training, _ = choose(train_hours=hours)
    timed = 0.05 * training.train_batch_size
    trained, chosen = steps_of(training, timed, train_hours=hours)
    assert (trained.train_batch_size, trained.num_train_steps) == (packs, steps)
    assert trained.train_batch_size % trained.micro_batch_size == 0
    assert [one.value for one in chosen[:2]] == [packs, steps]
    given, _ = steps_of(training, timed, train_hours=hours, train_batch_size=training.train_batch_size)
    assert given.train_batch_size == training.train_batch_size


@pytest.mark.parametrize(
    ("platform", "given", "model", "rate"),
    [
        ("cpu", {}, "bert-mini", 1e-3),
        ("gpu", {}, "bert-base", 2e-4),
        ("tpu", {}, "bert-base", 2e-4),
        ("cpu", {"bert_config_file": "bert-large"}, "bert-large", 1e-4),
        ("cpu", {"bert_config_file": "bert-tiny", "learning_rate": 0.5}, "bert-tiny", 0.5),
    ],
)
def test_the_model_follows_the_machine_and_the_rate_the_model(platform, given, model, rate):
    training, why = choose(platform, **given)
    assert (training.bert_config_file, training.learning_rate) == (model, rate)
    assert (why.get("learning_rate") == "given") == ("learning_rate" in given)
    assert [choices.choose_vocab_size(config(), size) for size in (10, 10**9)] == [8192, 30_522]
    assert choices.choose_vocab_size(config(vocab_size=50), 10**9) == 50


def test_a_micro_batch_fits_half_of_the_memory():
    program = types.SimpleNamespace(argument_bytes=100, peak_bytes=100 + 8 * 50)  # 50 a pack
    training, _ = choose()
    fitted, choice = choices.fit_memory(training, program, 2 * (100 + 4 * 50), False)
    assert (fitted.micro_batch_size, fitted.eval_batch_size, choice.value) == (4, 4, 4)
    assert fitted.train_batch_size % 4 == 0 and fitted.train_batch_size >= training.train_batch_size - 4
    assert choices.fit_memory(training, program, 10**9, False)[0] == training
    assert choices.fit_memory(training, program, 10, True)[0].micro_batch_size == 1
    unknown = types.SimpleNamespace(argument_bytes=None, peak_bytes=None)
    assert choices.fit_memory(training, unknown, 10, False)[0] == training
    assert choice.why == "fits half of 0.0 GiB"


def test_steps_are_of_epochs_or_hours():
    training, _ = choose(train_batch_size=100)
    of_epochs, _ = steps_of(training, num_train_epochs=5.0)
    packs = of_epochs.num_train_steps * of_epochs.train_batch_size
    assert packs == pytest.approx(50_000, rel=0.01)
    assert of_epochs.num_warmup_steps == of_epochs.num_train_steps // 10
    assert of_epochs.eval_steps == of_epochs.save_checkpoints_steps == of_epochs.num_train_steps // 10 == 50
    unevaluated, _ = choose(eval_fraction=0.0)
    assert not unevaluated.eval_input_file and not unevaluated.do_eval
    assert steps_of(unevaluated)[0].eval_steps == 0
    default, _ = steps_of(training)
    assert default.num_train_steps == pytest.approx(3 / 5 * of_epochs.num_train_steps, abs=1)
    of_hours, chosen = steps_of(training, 1.8, train_hours=0.5, train_batch_size=100)
    assert of_hours.num_train_steps == 1000
    assert chosen[1].why == "0.5 h of steps of 1.8 s"
    assert steps_of(training, 10**6, train_hours=0.5)[0].num_train_steps == 1


@pytest.mark.parametrize(
    ("hours", "steps", "save_and_eval", "log"),
    [(0.01, 20, (50, 50), 2), (0.5, 1000, (100, 100), 10), (25.0, 50_000, (1000, 5000), 10)],
)
def test_intervals_of_saving_evaluating_and_logging(hours, steps, save_and_eval, log):
    """A tenth of the run, but none so long that a kill costs hours, and rows that a person can wait for."""
    training, _ = choose(train_batch_size=100)
    made, _ = steps_of(training, 1.8, train_hours=hours, train_batch_size=100)
    assert (made.num_train_steps, made.log_steps) == (steps, log)
    assert (made.save_checkpoints_steps, made.eval_steps) == save_and_eval


def test_a_model_that_is_trained_already_goes_on_slowly(monkeypatch, tmp_path):
    monkeypatch.setattr(starting_weights, "read_model_config", lambda path: MODEL_SIZES["bert-mini"])
    training, why = choose(folder=tmp_path, init_checkpoint="model")
    assert training.learning_rate == 5e-5 and training.init_checkpoint == "model"
    assert training.bert_config_file == str(tmp_path / "flags/bert_config.json")
    assert load_model_config(training.bert_config_file) == MODEL_SIZES["bert-mini"]
    assert why["learning_rate"] == "of Adam, from init_checkpoint"
    # A config that is given later, before the training has saved, is not passed over for the stored one
    training, _ = choose(folder=tmp_path, init_checkpoint="model", bert_config_file="bert-small")
    assert training.bert_config_file == "bert-small"
