"""Every flag of `run_pretraining.py` arrives where it works: in the engine, the hooks or the files of a run.

`pretraining_runs.py` makes the runs, up to the outer loop.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest
from packs import VOCAB_SIZE
from pretraining_runs import CHANGED, FACTOR, MOMENT, STEPS_BEFORE, WIDE, make_runs, write_files
from tiny import MAX_SEQ_LENGTH

from bert_packed.checkpoints import checkpoint
from bert_packed.config import PRETRAINING
from bert_packed.models.heads import count_flops
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.training.optimization import build_optimizer

FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
STEPS = range(0, 50, 7)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    return make_runs(files[0], tmp_path_factory.mktemp("runs"))


def schedule(seen):
    """The optimizer's schedule, which is what the log says too."""
    found = seen.engine.optimizer._learning_rate
    first = int(seen.engine.optimizer.iterations)
    logged = [seen.hooks.learning_rate(step) for step in STEPS]
    assert logged == [float(found(first + step)) for step in STEPS]
    return found


def divided_by(seen, loss="mlm_loss", predicted="prediction_sequences"):
    """What a loss is divided by, in the step and in the log: the names of the counts."""
    predictions, sequences = np.count_nonzero(seen.batch[predicted]), seen.batch["slot_weights"]
    counts = {"num_predictions": predictions, "num_sequences": sequences.sum()}
    assert predictions != sequences.sum()
    objective = seen.engine.objective
    in_step = float(objective.denominators(objective.counts(seen.batch))[loss])
    sums = {name: float(number) for number, name in enumerate(seen.engine.objective.sum_names, 2)}
    in_log = sums[loss] / seen.hooks.means(sums)[loss]
    return [name for name in counts if counts[name] == in_step and sums[name] == pytest.approx(in_log)]


def nsp_loss(seen):
    """The next-sentence loss of a batch, and what the model's config says of it."""
    objective, model = seen.engine.objective, seen.engine.model
    loss = float(objective.sums(model(seen.batch), seen.batch)["nsp_loss"])
    return loss > 0, model.config.ablation_no_next_sentence


def block(seen):
    return seen.engine.model.bert.blocks[0]


def moments(seen):
    variables = [pair for place in (0, 3) for pair in seen.engine.optimizer.moments_of(place)]
    return {float(value) for variable in variables for value in variable.numpy().ravel()}


def masking(seen):
    """What draws masks anew; None where the records' stay."""
    return getattr(getattr(seen.batches, "_batches", None), "_masking", None)


def num_packs(seen):
    """Packs of the first steps, empty ones not counted."""
    batches = itertools.islice(seen.hooks.batches(0), 6)
    return [int(batch["sequence_ids"].any(axis=1).sum()) for batch in batches]


def is_from(seen, rows):
    return all(row in rows for row in seen.batch["token_ids"].tolist())


@dataclasses.dataclass(frozen=True)
class Case:
    """How a setting is seen to arrive.

    Attributes:
        seen: Function from what `run` gave, and the fixture `files`, to what is looked at.
        expected: What that is in the run that changed the setting.
        run, other: The run that changed it, and one that did not, where it must be something else.
    """

    seen: Callable
    expected: object
    run: str = "changed"
    other: str = "default"


DIFFERENT = object()  # from the other run; no value to expect
optimizer = {
    "weight_decay": "weight_decay_rate",
    "epsilon": "epsilon",
}
schedules = {
    "num_train_steps": "num_train_steps",
    "num_warmup_steps": "num_warmup_steps",
    "num_decay_steps": "num_decay_steps",
    "learning_rate": "peak",
    "end_learning_rate": "end",
    "decay_power": "power",
}
CASES = {
    **{
        name: Case(lambda seen, _, its=its: getattr(seen.engine.optimizer, its), CHANGED[name])
        for name, its in optimizer.items()
    },
    **{
        name: Case(lambda seen, _, its=its: getattr(schedule(seen), its), CHANGED[name])
        for name, its in schedules.items()
    },
    **{
        name: Case(lambda seen, _, name=name: getattr(seen.steps, name), CHANGED[name])
        for name in (
            "log_steps",
            "eval_steps",
            "save_checkpoints_steps",
            "max_skipped_steps",
            "export_every",
        )  # what `loop.train` reads
    },
    # under the packing correction
    "beta_1": Case(lambda seen, _: seen.engine.optimizer.beta_1, pytest.approx(0.8**FACTOR)),
    "beta_2": Case(lambda seen, _: seen.engine.optimizer.beta_2, pytest.approx(0.95**FACTOR)),
    "packing_correction": Case(
        lambda seen, _: np.log(seen.engine.optimizer.beta_1) / np.log(seen.steps.beta_1),
        pytest.approx(FACTOR),
    ),
    "input_file": Case(lambda seen, files: is_from(seen, files[1]["b"]), True),
    "eval_input_file": Case(
        lambda seen, files: [row in files[1]["c"] for part in seen.evaluated for row in part.tolist()],
        [True] * 4,
    ),
    "output_dir": Case(
        lambda seen, _: (seen.folder.name, len(list(seen.folder.glob("*.csv")))), ("changed", 2)
    ),
    "bert_config_file": Case(lambda seen, _: seen.engine.model.config.hidden_size, 32),
    "init_checkpoint": Case(
        lambda seen, files: all(
            np.array_equal(seen.weights[name], values)
            for name, values in checkpoint.read_weights(files[0] / "start" / "checkpoint-3").items()
        ),
        True,
    ),
    "keep_optimizer_state": Case(
        lambda seen, _: (int(seen.engine.optimizer.iterations), moments(seen)), (STEPS_BEFORE, {MOMENT})
    ),
    "max_grad_norm": Case(lambda seen, _: seen.engine.max_grad_norm, 0.5),
    "train_batch_size": Case(lambda seen, _: len(seen.batch["token_ids"]), 6),
    "micro_batch_size": Case(lambda seen, _: seen.engine._micro_batch_size, 2),
    "eval_batch_size": Case(lambda seen, _: [len(part) for part in seen.evaluated], [4]),
    "max_eval_steps": Case(lambda seen, _: len(seen.evaluated), 1),
    "mlm_loss": Case(lambda seen, _: divided_by(seen), ["num_predictions"]),
    "objective": Case(lambda seen, _: "label_ids" in seen.batch, True, run="next"),
    "lm_loss": Case(
        lambda seen, _: divided_by(seen, "lm_loss", "label_sequences"),
        ["num_sequences"],
        run="next",
        other="next by default",
    ),
    "ablation": Case(lambda seen, _: nsp_loss(seen), (False, True)),
    "dtype": Case(lambda seen, _: block(seen).attention.query.compute_dtype, "bfloat16"),
    "optimizer": Case(lambda seen, _: type(seen.engine.optimizer).__name__, "AdamWeightDecay", run="adam"),
    "initial_batch_size": Case(lambda seen, _: num_packs(seen)[0], 2, run="grown", other=""),
    "batch_warmup_steps": Case(
        lambda seen, _: (num_packs(seen), seen.engine.objective.skips_empty),
        ([2, 2, 4, 4, 6, 6], True),
        run="grown",
    ),
    "masking": Case(lambda seen, _: "fresh" if masking(seen) else "the records'", "fresh", run="masked"),
    "vocab_file": Case(lambda seen, _: len(masking(seen)._vocabulary), VOCAB_SIZE, run="masked", other=""),
    **{
        name: Case(
            lambda seen, _, name=name: getattr(masking(seen)._rules, name), value, run="masked", other=""
        )
        for name, value in (
            ("do_whole_word_mask", True),
            ("mask_replace_prob", 0.5),
            ("random_replace_prob", 0.25),
        )
    },
    "attention": Case(lambda seen, _: (seen.status, "`attention`" in seen.error), (2, True), run="flash"),
    "distribution": Case(lambda seen, _: seen.engine.replicas is not None, True, run="mirrored"),
    "layout": Case(lambda seen, _: (seen.status, seen.spread[0]), (2, "optimus2d"), run="spread"),
    "mesh": Case(lambda seen, _: seen.spread[1], (2, 3, 3), run="spread"),
    "summa": Case(lambda seen, _: seen.spread[2], "tree", run="spread"),
    "remat": Case(lambda seen, _: seen.engine.model.bert.remat, True),
    "hidden_dropout_prob": Case(
        lambda seen, _: {block(seen).attention.dropout.rate, block(seen).feed_forward.dropout.rate}, {0.2}
    ),
    "attention_probs_dropout_prob": Case(lambda seen, _: block(seen).attention.attention_dropout.rate, 0.3),
    "random_seed": Case(lambda seen, _: str(seen.seeds), DIFFERENT, run="seeded"),  # and see below
    "shuffle_buffer_size": Case(
        lambda seen, files: seen.batch["token_ids"].tolist() in (files[1]["a"][:3], files[1]["b"][:6]), True
    ),
    "peak_flops": Case(lambda seen, _: seen.hooks.scale.peak_flops, 2e12),
    "profile_steps": Case(
        lambda seen, _: (seen.hooks.profile._steps, seen.hooks.profile._folder.split("/")[-3:]),
        (range(3, 5), ["changed", "tensorboard", "profile"]),
    ),
    "compile_only": Case(
        lambda seen, _: (seen.folder.exists(), (seen.folder.parent / "program" / "step.json").exists()),
        (False, True),
        run="compiled",
    ),
    "num_virtual_devices": Case(lambda seen, _: seen.devices, [2], run="compiled"),
    "keep_checkpoint_max": Case(lambda seen, _: len(list(seen.folder.glob("checkpoint-*"))), 2),
    "export_vocab_file": Case(
        lambda seen, _: [path.parent.name for path in seen.folder.glob("export-*/vocab.txt")], ["export-5"]
    ),
    "sample_data": Case(lambda seen, _: seen.built_sample, True),
    "unpacked_input_file": Case(
        lambda seen, files: [
            (contender.name, contender.batches[0]["token_ids"].tolist()[0] in files[1]["unpacked"])
            for contender in seen.contenders
        ],
        [("unpacked", True), ("packed", False)],
    ),
    "overwrite": Case(
        lambda seen, _: (seen.status, (seen.folder / "checkpoint-77").exists()), (0, False), other="kept"
    ),
    "json": Case(
        lambda seen, _: json.loads(seen.report.read_text())["speed"],
        [{"data": "unpacked"}, {"data": "packed"}],
        other="",  # the other runs wrote none: the run would have failed
    ),
}


BESIDE = ("accept_lost_rows",)  # in test_pretraining.py


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in BESIDE])
def test_a_setting_arrives(files, runs, name):
    assert name in CASES, f"--{name} needs an entry here: how is it seen to arrive?"
    case, (made, flags) = CASES[name], runs
    assert flags[name] != FIELDS[name].default
    found = case.seen(made[case.run], files)
    if case.expected is not DIFFERENT:
        assert found == case.expected
    if case.other:
        assert case.seen(made[case.other], files) != found


@pytest.mark.parametrize("name", ["masked", "grown"])
def test_a_run_that_continues_has_the_masks_of_one_that_never_stopped(runs, name):
    batches = runs[0][name].hooks.batches
    whole, rest = list(itertools.islice(batches(0), 8)), list(itertools.islice(batches(5), 3))
    for one, other in zip(whole[5:], rest, strict=True):
        np.testing.assert_array_equal(one["token_ids"], other["token_ids"])


def test_a_batch_that_grows_has_the_masks_of_one_that_does_not(runs):
    """The same packs in the same order, whatever steps they are in."""

    def rows(name, num_steps):
        batches = itertools.islice(runs[0][name].hooks.batches(0), num_steps)
        return [row for batch in batches for row in batch["token_ids"].tolist() if any(row)]

    grown, plain = rows("grown", 6), rows("masked", 8)
    assert len(grown) == sum([2, 2, 4, 4, 6, 6]) == len(plain) == 24
    assert grown == plain


def test_masked_tokens_alone_are_learnt_by_a_model_for_them(runs):
    seen = runs[0]["mlm"]
    assert seen.engine.model.head == "masked_lm" and "nsp_labels" not in seen.batch
    counts = {"num_tokens": 3.0, "num_pairs": 5.0, "num_predictions": 2.0, "num_sequences": 1.0}
    config, flops = seen.engine.model.config, seen.hooks.scale.model_flops(counts)
    with_both, width = count_flops(PRETRAINING, config, counts), config.hidden_size
    assert with_both - flops == 6 * (width**2 + 2 * width)


def test_the_peak_is_measured_in_the_dtype_of_the_run(runs):
    assert [runs[0][name].dtype for name in ("default", "changed")] == ["float32", "bfloat16"]
    assert runs[0]["default"].hooks.scale.peak_flops == 1e9


def test_what_is_watched_is_measured_by_the_run(runs):
    seen = runs[0]["changed"]
    packs, length = seen.batch["token_ids"].shape
    assert seen.hooks.scale.positions_per_step == packs * length == 6 * MAX_SEQ_LENGTH
    counts = {"num_tokens": 3.0, "num_pairs": 5.0, "num_predictions": 2.0, "num_sequences": 1.0}
    assert seen.hooks.scale.model_flops(counts) == count_flops(PRETRAINING, WIDE, counts)


def test_the_seed_is_of_weights_dropout_and_order(runs):
    one, other = (runs[0][name] for name in ("default", "seeded"))
    kernel = "bert/layer_0/attention/query/kernel"
    assert not np.array_equal(one.weights[kernel], other.weights[kernel])
    assert str(one.seeds) != str(other.seeds)
    assert one.batch["token_ids"].tolist() != other.batch["token_ids"].tolist()


def test_a_norm_of_0_clips_nothing():
    config = TrainConfig(input_file="x", output_dir="y", max_grad_norm=0.0)
    assert build_optimizer(config).global_clipnorm is None


def test_norms_and_biases_are_neither_decayed_nor_adapted(runs):
    engine = runs[0]["changed"].engine
    for variable in engine.model.trainable_variables:
        is_plain = "LayerNorm" in variable.path or "bias" in variable.path.split("/")[-1]
        assert engine.optimizer.decays(variable) == engine.optimizer.adapts(variable) == (not is_plain)
