"""Every flag of SQuAD arrives where it works: engine, hooks, packs, answers.

As `test_pretraining_settings`: the commands run, with the outer loop handed over to the test instead of
training, once with every flag changed, once with what must be given, and a few times more for flags that
exclude each other.
"""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from finetuning_runs import LENGTH, WORDS, arguments, run, write_files
from pretraining_runs import other_run

from bert_packed.checkpoints import checkpoint
from bert_packed.runs.finetuning_config import SquadConfig
from bert_packed.training.metrics_log import read_rows

FIELDS = {field.name: field for field in dataclasses.fields(SquadConfig)}

CHANGED = {
    "do_lower_case": False,
    "max_seq_length": 40,
    "train_batch_size": 5,
    "micro_batch_size": 2,
    "predict_batch_size": 3,
    "max_sequences_per_pack": 2,
    "packing_algorithm": "spfhp",
    "learning_rate": 0.03,
    "num_train_epochs": 30.0,
    "warmup_proportion": 0.5,
    "optimizer": "lamb",
    "weight_decay": 0.05,
    "beta_1": 0.8,
    "beta_2": 0.95,
    "epsilon": 1e-3,
    "max_grad_norm": 0.5,
    "dtype": "mixed_bfloat16",
    "remat": True,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "max_skipped_steps": 7,
    "log_steps": 3,
    "save_checkpoints_steps": 11,
    "keep_checkpoint_max": 2,
    "overwrite": True,
    "doc_stride": 7,
    "max_query_length": 9,
    "version_2_with_negative": True,
    "null_score_diff_threshold": 1.5,
    "n_best_size": 6,
    "max_answer_length": 8,
    "skip_bad_answers": True,
}  # and files, in the fixture
PLAIN = {"adam_bias_correction": False, "do_predict": False, "random_seed": 99}  # what CHANGED excludes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    """The runs of SQuAD by name, and all flags that some run changed."""
    tmp = tmp_path_factory.mktemp("runs")
    given = {
        "train_file": files / "questions.json",
        "predict_file": files / "questions.json",
        "vocab_file": files / "vocab.txt",
        "bert_config_file": files / "narrow.json",
        "max_seq_length": LENGTH,
        "max_query_length": 16,
    }
    changed = {
        **CHANGED,
        "train_file": files / "train.json",
        "predict_file": files / "predict.json",
        "vocab_file": files / "other.txt",
        "bert_config_file": files / "wide.json",
        "init_checkpoint": files / "start",
        "json": tmp / "scores.json",
    }
    model = {"init_checkpoint": files / "start", "bert_config_file": files / "wide.json", "do_train": False}
    made = {
        "default": run("squad", tmp / "default", **given),
        "changed": run("squad", other_run(tmp / "changed"), **changed),
        "plain": run("squad", tmp / "plain", **given, **PLAIN),
        "untrained": run("squad", tmp / "untrained", **{**given, **model}, dtype="mixed_bfloat16"),
        "kept": run("squad", other_run(tmp / "kept"), **given),
    }
    for name in ("default", "changed", "plain", "untrained"):
        assert made[name].status == 0, made[name].error
    return made, {**changed, **PLAIN, "do_train": False, "output_dir": tmp / "changed"}, tmp / "scores.json"


def schedule(seen):
    """The optimizer's schedule, which is what the log says too."""
    found = seen.engine.optimizer._learning_rate
    steps = range(0, seen.steps.num_train_steps, 3)
    assert [seen.hooks.learning_rate(step) for step in steps] == [float(found(step)) for step in steps]
    return found


def block(seen):
    return seen.engine.model.bert.blocks[0]


@dataclasses.dataclass(frozen=True)
class Case:
    """How a setting is seen to arrive: as `expected`, in the run that changed it, and not so in `other`."""

    seen: Callable
    expected: object
    run: str = "changed"
    other: str = "default"


def called(**settings):
    """Cases of settings that become arguments: by the setting, `(function, argument)` pairs."""
    return {
        name: Case(
            lambda seen, pairs=pairs: {value for pair in pairs for value in arguments(seen, *pair)},
            {CHANGED[name]},
        )
        for name, pairs in settings.items()
    }


def attribute(**settings):
    """Cases of settings that become attributes: by the setting, a function to the object, and its name."""
    return {
        name: Case(lambda seen, get=get, its=its: getattr(get(seen), its), CHANGED[name])
        for name, (get, its) in settings.items()
    }


def of_optimizer(seen):
    return seen.engine.optimizer


def of_steps(seen):
    return seen.steps


CASES = {
    **called(
        do_lower_case=[("make_tokenizer", "do_lower_case")],
        max_seq_length=[(f, "max_seq_length") for f in ("make_windows", "plan_updates", "pack_all")],
        max_sequences_per_pack=[("plan_updates", "depth"), ("pack_all", "depth")],
        packing_algorithm=[("plan_updates", "algorithm"), ("pack_all", "algorithm")],
        train_batch_size=[("plan_updates", "batch_size")],
        predict_batch_size=[("predict", "batch_size")],
        doc_stride=[("make_windows", "doc_stride")],
        max_query_length=[("make_windows", "max_query_length")],
        version_2_with_negative=[(f, "version_2_with_negative") for f in ("read_squad", "extract")],
        skip_bad_answers=[("read_squad", "skip_bad_answers")],
        null_score_diff_threshold=[("extract", "null_score_diff_threshold")],
        n_best_size=[("extract", "n_best_size")],
        max_answer_length=[("extract", "max_answer_length")],
    ),
    **attribute(
        weight_decay=(of_optimizer, "weight_decay_rate"),
        beta_1=(of_optimizer, "beta_1"),
        beta_2=(of_optimizer, "beta_2"),
        epsilon=(of_optimizer, "epsilon"),
        max_grad_norm=(lambda seen: seen.engine, "max_grad_norm"),
        optimizer=(of_optimizer, "name"),
        learning_rate=(schedule, "peak"),
        max_skipped_steps=(of_steps, "max_skipped_steps"),
        log_steps=(of_steps, "log_steps"),
        save_checkpoints_steps=(of_steps, "save_checkpoints_steps"),
        micro_batch_size=(lambda seen: seen.engine, "_micro_batch_size"),
        remat=(lambda seen: seen.engine.model.bert, "remat"),
        attention_probs_dropout_prob=(lambda seen: block(seen).attention.attention_dropout, "rate"),
    ),
    # one sequence with an answer and one without, 30 times, 5 a step; half of the steps
    "num_train_epochs": Case(
        lambda seen: (seen.steps.num_train_steps, schedule(seen).num_train_steps), (12, 12)
    ),
    "warmup_proportion": Case(
        lambda seen: schedule(seen).num_warmup_steps / schedule(seen).num_train_steps, 0.5
    ),
    "adam_bias_correction": Case(lambda seen: seen.engine.optimizer.corrects_bias, False, run="plain"),
    "hidden_dropout_prob": Case(
        lambda seen: {block(seen).attention.dropout.rate, block(seen).feed_forward.dropout.rate}, {0.2}
    ),
    "dtype": Case(lambda seen: block(seen).attention.query.compute_dtype, "bfloat16"),
    "random_seed": Case(lambda seen: arguments(seen, "plan_updates", "seed"), [99], run="plain"),
    "output_dir": Case(
        lambda seen: (seen.folder.name, (seen.folder / "predictions.json").exists()), ("changed", True)
    ),
    "bert_config_file": Case(lambda seen: seen.engine.model.config.hidden_size, 32),
    "vocab_file": Case(lambda seen: (seen.folder / "vocab.txt").read_text().split()[-1], WORDS[0]),
    "train_file": Case(
        lambda seen: arguments(seen, "read_squad", "path")[1].rpartition("/")[2],
        "train.json",
    ),
    "predict_file": Case(
        lambda seen: arguments(seen, "read_squad", "path")[0].rpartition("/")[2],
        "predict.json",
    ),
    "keep_checkpoint_max": Case(lambda seen: len(list(seen.folder.glob("checkpoint-*"))), 2),
    "do_train": Case(lambda seen: seen.engine, None, run="untrained"),
    "do_predict": Case(lambda seen: len(seen.calls.get("extract", [])), 0, run="plain"),
    "overwrite": Case(
        lambda seen: (seen.status, (seen.folder / "checkpoint-77").exists()), (0, False), other="kept"
    ),
}
BESIDE = ("init_checkpoint", "json", "accept_lost_rows")  # tested below, by more than a value


def test_every_setting_has_an_entry():
    """A new flag needs one: how is it seen to arrive?"""
    assert sorted([*CASES, *BESIDE]) == sorted(FIELDS)


@pytest.mark.parametrize("name", CASES)
def test_a_setting_arrives(runs, name):
    case, (made, flags, _) = CASES[name], runs
    assert flags[name] != FIELDS[name].default
    found = case.seen(made[case.run])
    assert found == case.expected
    assert case.seen(made[case.other]) != found


def test_init_checkpoint_and_json(files, runs):
    made, _, scores = runs
    stored = checkpoint.read_weights(files / "start")
    assert made["changed"].weights.keys() == stored.keys()
    assert all(np.array_equal(values, stored[name]) for name, values in made["changed"].weights.items())
    assert "f1" in json.loads(scores.read_text())


def test_lost_rows_of_the_log_are_refused_unless_accepted(files, tmp_path):
    flags = {"train_file": files / "questions.json", "vocab_file": files / "vocab.txt", "log_steps": 1}
    flags |= {"bert_config_file": files / "narrow.json", "max_seq_length": LENGTH, "do_predict": False}
    flags |= {"max_query_length": 16, "num_train_epochs": 30.0}
    assert run("squad", tmp_path, **flags).status == 0  # which saved three steps, and has logged none
    refused = run("squad", tmp_path, **flags)
    assert refused.status == 2 and "metrics.csv must have the row of every logged step" in refused.error
    run("squad", tmp_path, **flags, accept_lost_rows=True)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == ["1", "2", "3"]


def test_the_seed_is_of_the_weights_too(runs):
    kernel = "question_answering/output/kernel"
    assert not np.array_equal(runs[0]["default"].weights[kernel], runs[0]["plain"].weights[kernel])


def test_norms_and_biases_are_not_decayed(runs):
    engine = runs[0]["default"].engine
    for variable in engine.model.trainable_variables:
        is_plain = "LayerNorm" in variable.path or "bias" in variable.path.split("/")[-1]
        assert engine.optimizer.decays(variable) == (not is_plain)
