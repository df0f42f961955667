"""Settings of fine-tuning in effect: runs up to the outer loop, which is handed over to the test.

Those that all tasks share are seen on SQuAD; GLUE and tagging have their own alone.
"""

import dataclasses
import json

import numpy as np
import pytest
import recorded_calls
from recorded_calls import SAVES, add_results, arguments, other_run, run
from squad_files import CONTEXT, QUESTIONS, entry, write
from tiny import CONFIG

from bert_packed import cli
from bert_packed.architectures import packed_model
from bert_packed.architectures.registry import QUESTION_ANSWERING
from bert_packed.checkpoints import checkpoint
from bert_packed.kernels.choose import Kernels
from bert_packed.tasks import run as finetuning
from bert_packed.tasks.classify import task as classification
from bert_packed.tasks.glue import files as glue
from bert_packed.tasks.glue import task as glue_finetuning
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.ner import conll
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.squad import predictions as squad_predictions
from bert_packed.tasks.squad import task as squad_finetuning
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.text import tokenization
from bert_packed.training import loop
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.metrics_log import read_rows

LENGTH = 48
WORDS = [f"w{number}" for number in range(20)]
COMMANDS = {
    "squad": (cli.squad, SquadConfig),
    "glue": (cli.fine_tune, GlueConfig),
    "ner": (cli.fine_tune, NerConfig),
}
RECORDED = (
    *((finetuning, name) for name in ("plan_updates", "pack_all", "make_engine")),
    *((squad_finetuning, name) for name in ("read_squad", "make_windows")),
    (squad_predictions, "extract"),
    (tokenization, "make_tokenizer"),
    (glue_finetuning, "read_glue"),
    (classification, "make_text_sequences"),
    *((conll, name) for name in ("read_conll", "make_tag_sequences")),
)
CHANGED = recorded_calls.CHANGED | {"do_lower_case": False, "max_seq_length": 40, "train_batch_size": 5}
CHANGED |= {"predict_batch_size": 3, "max_sequences_per_pack": 2, "packing_algorithm": "spfhp"}
CHANGED |= {"num_train_epochs": 30.0, "warmup_proportion": 0.5, "optimizer": "lamb", "doc_stride": 7}
CHANGED |= {"max_query_length": 9, "version_2_with_negative": True, "null_score_diff_threshold": 1.5}
CHANGED |= {"n_best_size": 6, "max_answer_length": 8, "skip_bad_answers": True}
# These arguments of functions are settings by the same name: all of their calls have the value
PASSED = {
    "make_tokenizer": ["do_lower_case"],
    "make_windows": ["max_seq_length", "doc_stride", "max_query_length"],
    "plan_updates": ["max_seq_length"],
    "pack_all": ["max_seq_length"],
    "read_squad": ["version_2_with_negative", "skip_bad_answers"],
    "extract": ["version_2_with_negative", "null_score_diff_threshold", "n_best_size", "max_answer_length"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Questions, vocabularies, models, and a folder of SST-2 and of RTE."""
    folder = tmp_path_factory.mktemp("files")
    write(folder / "questions.json", *QUESTIONS)
    pair = [entry("1", "Who wrote it?", "Ada Lovelace"), entry("2", "Why?", is_impossible=True)]
    for name in ("train", "predict"):
        write(folder / f"{name}.json", (CONTEXT, pair), version="v2.0")
    for name, words in (("vocab", WORDS), ("other", WORDS[::-1])):
        lines = [*tokenization.SPECIAL_TOKENS, *words]
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    for name, width in (("narrow", 16), ("wide", 32)):
        shape = {"vocab_size": len(lines), "hidden_size": width, "num_hidden_layers": 1}
        config = dataclasses.replace(CONFIG, **shape, **rates, max_position_embeddings=LENGTH)
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(config)))
    model = packed_model.build_model(QUESTION_ANSWERING, config, num_outputs=2, seed=7)
    checkpoint.save_weights(folder / "start", named_weights(model), config)
    for task, header in (("SST-2", "sentence\tlabel"), ("RTE", "index\tsentence1\tsentence2\tlabel")):
        (folder / task).mkdir()
        row = "w1 w2\t1" if task == "SST-2" else "0\tw1 w2\tw3\tentailment"
        for split in ("train", "dev"):
            (folder / task / f"{split}.tsv").write_text(f"{header}\n" + f"{row}\n" * 4)
    (folder / "RTE" / "test.tsv").write_text("index\tsentence1\tsentence2\n0\tw1 w2\tw3\n")
    return folder


def train(engine, config, hooks, first_step=0, state=None):
    """Replace the outer loop: save and prune, without a step."""
    for step in range(SAVES):
        hooks.save(step, {"interval": {}, "evaluation_due": False})
    hooks.prune()


def run_to_loop(command, folder, **flags):
    def predict(forward, sequences, packs, spec, batch_size):
        found = {name: [np.zeros(n) for n in sequences["lengths"]] for name in ("start_logits", "end_logits")}
        logits = [np.zeros((n, 2) if command == "ner" else 2) for n in sequences["lengths"]]
        return {**found, "logits": logits}

    stand_ins = {(loop, "train"): train, (finetuning, "predict"): predict}
    seen = run(*COMMANDS[command], RECORDED, stand_ins, output_dir=folder, **flags)
    return add_results(seen, folder)


def given(files, **flags):
    names = {"train_file": files / "questions.json", "predict_file": files / "questions.json"}
    models = {"vocab_file": files / "vocab.txt", "bert_config_file": files / "narrow.json"}
    return {**names, **models, "max_seq_length": LENGTH, "max_query_length": 16, **flags}


@pytest.fixture(scope="module")
def default(files, tmp_path_factory):
    return run_to_loop("squad", tmp_path_factory.mktemp("default"), **given(files))


@pytest.fixture(scope="module")
def changed(files, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("changed")
    seen = run_to_loop(
        "squad",
        other_run(tmp / "run"),
        **CHANGED,
        train_file=files / "train.json",
        predict_file=files / "predict.json",
        vocab_file=files / "other.txt",
        bert_config_file=files / "wide.json",
        init_checkpoint=files / "start",
        json=tmp / "scores.json",
    )
    assert seen.status == 0, seen.error
    return seen


@pytest.mark.parametrize("function", PASSED)
def test_settings_that_are_passed_on(changed, function):
    for name in PASSED[function]:
        assert {*arguments(changed, function, name)} == {CHANGED[name]}


# Each other setting is seen at this place, with this value
SEEN = recorded_calls.SEEN | {
    "max_sequences_per_pack": (lambda seen: arguments(seen, "pack_all", "depth"), [2]),
    "max_sequences_per_pack of updates": (lambda seen: arguments(seen, "plan_updates", "depth"), [2]),
    "packing_algorithm": (lambda seen: arguments(seen, "pack_all", "algorithm"), ["spfhp"]),
    "packing_algorithm of updates": (lambda seen: arguments(seen, "plan_updates", "algorithm"), ["spfhp"]),
    "train_batch_size": (lambda seen: arguments(seen, "plan_updates", "batch_size"), [5]),
    "predict_batch_size": (lambda seen: arguments(seen, "predict", "batch_size"), [3]),
    # One sequence has an answer and one has none
    "num_train_epochs": (lambda seen: seen.config.num_train_steps, 2 * 30 // 5),
    "beta_1": (lambda seen: seen.engine.optimizer.beta_1, 0.8),
    "beta_2": (lambda seen: seen.engine.optimizer.beta_2, 0.95),
    "optimizer": (lambda seen: seen.engine.optimizer.name, "lamb"),
    "do_predict": (lambda seen: (seen.folder / "predictions.json").exists(), True),
    "json": (lambda seen: "f1" in json.loads((seen.folder.parent / "scores.json").read_text()), True),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_setting_has_its_effect(changed, name):
    found, value = SEEN[name]
    assert found(changed) == value


def test_files_and_rates(changed, files):
    stored = checkpoint.read_weights(files / "start")
    assert changed.weights.keys() == stored.keys()
    assert all(np.array_equal(values, stored[name]) for name, values in changed.weights.items())
    assert (changed.folder / "vocab.txt").read_bytes() == (files / "other.txt").read_bytes()
    paths, trains = (arguments(changed, "read_squad", name) for name in ("path", "for_training"))
    read = [(path.rpartition("/")[2], each) for path, each in zip(paths, trains, strict=True)]
    assert read == [("predict.json", False), ("train.json", True)]
    for step in range(12):  # 6 steps up and 6 down
        rate = 0.03 * min((step + 1) / 6, (12 - step) / 6)
        assert changed.hooks.learning_rate(step) == pytest.approx(rate, rel=1e-5)
        changed.engine.optimizer.iterations.assign(step)
        assert float(changed.engine.optimizer.learning_rate) == pytest.approx(rate, rel=1e-5)


def test_the_seed_bias_correction_and_no_prediction(default, files, tmp_path):
    flags = {"adam_bias_correction": False, "do_predict": False, "random_seed": 99}
    other = run_to_loop("squad", tmp_path, **given(files), **flags)
    assert [seen.engine.optimizer.corrects_bias for seen in (default, other)] == [True, False]
    assert "extract" in default.calls and "extract" not in other.calls
    assert arguments(other, "plan_updates", "seed") == [99]
    kernel = "question_answering/output/kernel"
    assert not np.array_equal(default.weights[kernel], other.weights[kernel])


def test_a_checkpoint_is_taken_as_it_is(files, tmp_path):
    models = {"init_checkpoint": files / "start", "bert_config_file": files / "wide.json"}
    seen = run_to_loop("squad", tmp_path, **given(files, **models), do_train=False)
    assert seen.status == 0 and seen.engine is None and "extract" in seen.calls


def test_an_earlier_run_is_kept_unless_it_is_overwritten(files, tmp_path):
    kept = run_to_loop("squad", other_run(tmp_path / "kept"), **given(files))
    assert kept.status == 2 and (kept.folder / "checkpoint-77").exists()


def test_kernels_are_of_training_and_prediction(files, tmp_path, monkeypatch):
    """And where there is none, one line says so."""
    asked, built, build, attend = [], [], packed_model.build_model, object()
    choice = Kernels({"attend": attend}, "a kernel")
    models = {"init_checkpoint": files / "start", "bert_config_file": files / "wide.json"}
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "choose_kernels", lambda *of: asked.append(of) or choice)
        patch.setattr(
            packed_model,
            "build_model",
            lambda *of, attend=None, **more: built.append(attend) or build(*of, **more),
        )
        for do_train in (True, False):
            flags = {**given(files, **models), "attention": "dense", "do_train": do_train}
            assert run_to_loop("squad", tmp_path / str(do_train), **flags).status == 0
    assert built == [attend, attend]
    assert [(attention, length) for attention, _, length, _ in asked] == [("dense", LENGTH)] * 2
    refused = run_to_loop("squad", tmp_path / "flash", **given(files), attention="flash")
    assert refused.status == 2 and refused.error.count("\n") == 1 and "`attention` must" in refused.error


def test_lost_rows_of_the_log_are_refused_unless_accepted(files, tmp_path):
    flags = given(files, log_steps=1, do_predict=False, num_train_epochs=30.0)
    assert run_to_loop("squad", tmp_path, **flags).status == 0  # which saved four steps, and has logged none
    record = (tmp_path / "run.json").read_bytes()
    refused = run_to_loop("squad", tmp_path, **flags)
    assert (tmp_path / "run.json").read_bytes() == record
    assert refused.status == 2 and "metrics.csv must have the row of every logged step" in refused.error
    run_to_loop("squad", tmp_path, **flags, accept_lost_rows=True)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == ["1", "2", "3", "4"]


def test_settings_of_glue(files, tmp_path):
    flags = {"vocab_file": files / "vocab.txt", "bert_config_file": files / "narrow.json"}
    runs = (
        ("SST-2", {"max_seq_length": 24}, ["dev.tsv", "train.tsv"]),
        ("RTE", {"max_seq_length": 32, "do_eval": False, "do_predict": True}, ["train.tsv"]),
    )
    for task, more, read in runs:
        flags |= {"task_name": task, "data_dir": files / task, "num_train_epochs": 1, **more}
        seen = run_to_loop("glue", tmp_path / task, **flags)
        assert seen.status == 0, seen.error
        assert all(each is glue.TASKS[task] for each in arguments(seen, "read_glue", "task"))
        assert [path.split("/")[-2:] for path in arguments(seen, "read_glue", "path")] == [
            [task, name] for name in read
        ]
        assert (seen.folder / "eval_results.json").exists() == (task == "SST-2")
        assert (seen.folder / "RTE.tsv").exists() == (task == "RTE")
        for function in ("make_text_sequences", "plan_updates"):
            assert {*arguments(seen, function, "max_seq_length")} == {more["max_seq_length"]}


def test_settings_of_tagging(files, tmp_path):
    flags = {"vocab_file": files / "vocab.txt", "bert_config_file": files / "narrow.json"}
    (tmp_path / "one.txt").write_text("w1 O\nw2 B-X\n\n" * 4)
    (tmp_path / "two.txt").write_text("w3 B-X\n\n" * 4)
    (tmp_path / "labels.txt").write_text("O\nB-Y\nB-X\n")
    one = {"train_file": tmp_path / "one.txt", "predict_file": tmp_path / "two.txt", "max_seq_length": 32}
    two = {"train_file": tmp_path / "two.txt", "labels_file": tmp_path / "labels.txt", "max_seq_length": 24}
    two |= {
        "do_predict": False,
        "predict_file": tmp_path / "one.txt",
        "doc_stride": 5,
        "tag_loss": "per_token",
    }
    first, second = (
        run_to_loop("ner", tmp_path / name, **flags, num_train_epochs=1, **its)
        for name, its in (("first", one), ("second", two))
    )
    assert [first.status, second.status] == [0, 0], (first.error, second.error)
    read = [[str(path)[-7:] for path in arguments(seen, "read_conll", "path")] for seen in (first, second)]
    assert read == [["one.txt", "two.txt"], ["two.txt"]]
    assert [seen.batch["token_ids"].max() for seen in (first, second)] == [7, 8]  # w2, w3
    assert [(seen.folder / "predictions.txt").exists() for seen in (first, second)] == [True, False]
    assert (first.folder / "labels.txt").read_text().split() == ["B-X", "O"]
    assert (second.folder / "labels.txt").read_text().split() == ["O", "B-Y", "B-X"]
    losses = [seen.engine.objective.losses["loss"] for seen in (first, second)]
    assert losses == ["num_sequences", "num_predictions"]
    for seen, length, stride in ((first, 32, NerConfig.doc_stride), (second, 24, 5)):
        assert {*arguments(seen, "make_tag_sequences", "doc_stride")} == {stride}
        for function in ("make_tag_sequences", "plan_updates"):
            assert {*arguments(seen, function, "max_seq_length")} == {length}
