"""Every flag of SQuAD, GLUE and tagging arrives where it works: engine, hooks, packs, answers.

As `test_pretraining_settings`: the commands run, with the outer loop handed over to the test instead of
training, once with every flag changed, once with what must be given, and a few times more for flags that
exclude each other.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import types
from collections.abc import Callable

import numpy as np
import pytest
from pretraining_runs import other_run
from squad_files import CONTEXT, QUESTIONS, entry, write
from tiny import CONFIG

import run_squad
from bert_packed import finetune_glue, finetune_ner
from bert_packed.checkpoints import checkpoint
from bert_packed.evaluation import glue_predictions, squad_predictions
from bert_packed.models.heads import build_model
from bert_packed.models.modeling import QUESTION_ANSWERING
from bert_packed.runs import finetuning
from bert_packed.runs.finetuning_config import GlueConfig, NerConfig, SquadConfig
from bert_packed.training import loop
from bert_packed.training.engines.variables import named_weights
from data_gen.cli import command_line
from data_gen.tasks import glue, squad, squad_windows
from data_gen.text import tokenization

FIELDS = {field.name: field for field in dataclasses.fields(SquadConfig)}
OWN_OF_GLUE = list(GlueConfig.__annotations__)
LENGTH, SAVES = 48, 4
WORDS = [f"w{number}" for number in range(20)]
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
    model = build_model(QUESTION_ANSWERING, config, 2, seed=7)
    checkpoint.save_weights(folder / "start", named_weights(model), config)
    for task, header in (("SST-2", "sentence\tlabel"), ("RTE", "index\tsentence1\tsentence2\tlabel")):
        (folder / task).mkdir()
        row = "w1 w2\t1" if task == "SST-2" else "0\tw1 w2\tw3\tentailment"
        for split in ("train", "dev"):
            (folder / task / f"{split}.tsv").write_text(f"{header}\n" + f"{row}\n" * 4)
    (folder / "RTE" / "test.tsv").write_text("index\tsentence1\tsentence2\n0\tw1 w2\tw3\n")
    return folder


RECORDED = (
    (finetuning, "plan_updates"),
    (finetuning, "pack_all"),
    (finetuning, "predict"),
    (squad, "read_squad"),
    (squad_windows, "make_windows"),
    (squad_predictions, "extract"),
    (tokenization, "make_tokenizer"),
    (finetune_glue, "read_glue"),
    (glue_predictions, "read_glue"),
    (finetune_glue, "make_glue_sequences"),
    (finetune_ner, "read_conll"),
    (finetune_ner, "make_tag_sequences"),
)


def run(command, folder, **flags):
    """A command under flags: what reached the loop, the arguments of `RECORDED`, and what it left."""
    seen = types.SimpleNamespace(engine=None, calls={}, folder=folder)
    main, config_class = {
        "squad": (run_squad.main, SquadConfig),
        "glue": (finetune_glue.main, GlueConfig),
        "ner": (finetune_ner.main, NerConfig),
    }[command]

    def train(engine, steps, hooks, first_step, state):
        seen.engine, seen.steps, seen.hooks = engine, steps, hooks
        seen.weights = {name: variable.numpy() for name, variable in engine.weights().items()}
        seen.batch = next(iter(hooks.batches(first_step)))
        for step in range(SAVES):
            hooks.save(step, {})
        hooks.prune()

    def recording(function):
        def call(*arguments, **keywords):
            bound = inspect.signature(function).bind(*arguments, **keywords)
            seen.calls.setdefault(function.__name__, []).append(bound.arguments)
            return (
                zeros(**bound.arguments)
                if function.__name__ == "predict"
                else function(*arguments, **keywords)
            )

        return call

    def zeros(forward, sequences, **_):
        seen.forward = forward
        found = {name: [np.zeros(n) for n in sequences.lengths] for name in ("start_logits", "end_logits")}
        return {**found, "logits": [np.zeros((n, 2) if command == "ner" else 2) for n in sequences.lengths]}

    argv = [command, *(f"--{name}={value}" for name, value in {"output_dir": folder, **flags}.items())]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as error:
        patch.setattr(loop, "train", train)
        for module, name in RECORDED:
            patch.setattr(module, name, recording(getattr(module, name)))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            seen.status = command_line.run(main, config_class, "", argv)
    seen.error, seen.out = error.getvalue(), out.getvalue()
    return seen


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


def arguments(seen, function, name):
    """The values that an argument of a recorded function had, one a call."""
    return [call[name] for call in seen.calls.get(function, [])]


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
BESIDE = ("init_checkpoint", "json")  # tested below, by more than a value


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


def test_the_seed_is_of_the_weights_too(runs):
    kernel = "question_answering/output/kernel"
    assert not np.array_equal(runs[0]["default"].weights[kernel], runs[0]["plain"].weights[kernel])


def test_norms_and_biases_are_not_decayed(runs):
    engine = runs[0]["default"].engine
    for variable in engine.model.trainable_variables:
        is_plain = "LayerNorm" in variable.path or "bias" in variable.path.split("/")[-1]
        assert engine.optimizer.decays(variable) == (not is_plain)


@pytest.fixture(scope="module")
def glue_runs(files, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("glue")
    given = {
        "vocab_file": files / "vocab.txt",
        "bert_config_file": files / "narrow.json",
        "num_train_epochs": 1,
    }
    made = [
        run("glue", tmp / "one", task_name="SST-2", data_dir=files / "SST-2", max_seq_length=24, **given),
        run(
            "glue",
            tmp / "two",
            task_name="RTE",
            data_dir=files / "RTE",
            max_seq_length=32,
            do_eval=False,
            do_predict=True,
            **given,
        ),
    ]
    assert [seen.status for seen in made] == [0, 0], [seen.error for seen in made]
    return made


@pytest.mark.parametrize("name", OWN_OF_GLUE)
def test_a_setting_of_glue_arrives(glue_runs, name):
    """Its own flags; those it shares with SQuAD go through the same function, `train_or_load`."""
    seen = {
        "task_name": lambda one: arguments(one, "read_glue", "task"),
        "data_dir": lambda one: arguments(one, "read_glue", "path"),
        "do_eval": lambda one: (one.folder / "eval_results.json").exists(),
        "do_predict": lambda one: (one.folder / "RTE.tsv").exists(),
        "max_seq_length": lambda one: {
            *arguments(one, "make_glue_sequences", "max_seq_length"),
            *arguments(one, "plan_updates", "max_seq_length"),
        },
    }[name]
    one, two = map(seen, glue_runs)
    if name == "task_name":
        assert one == [glue.TASKS["SST-2"]] * 2 and two == [glue.TASKS["RTE"]]
    elif name == "data_dir":
        assert [path.split("/")[-2:] for path in one] == [["SST-2", "dev.tsv"], ["SST-2", "train.tsv"]]
        assert [path.split("/")[-2:] for path in two] == [["RTE", "train.tsv"]]
    else:
        expected = {"do_eval": (True, False), "do_predict": (False, True), "max_seq_length": ({24}, {32})}
        assert (one, two) == expected[name]


@pytest.fixture(scope="module")
def ner_runs(files, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("ner")
    (tmp / "one.txt").write_text("w1 O\nw2 B-X\n\n" * 4)
    (tmp / "two.txt").write_text("w3 B-X\n\n" * 4)
    (tmp / "labels.txt").write_text("O\nB-Y\nB-X\n")
    given = {
        "vocab_file": files / "vocab.txt",
        "bert_config_file": files / "narrow.json",
        "num_train_epochs": 1,
    }
    first = {"train_file": tmp / "one.txt", "predict_file": tmp / "two.txt", "max_seq_length": 32}
    second = {"train_file": tmp / "two.txt", "labels_file": tmp / "labels.txt", "max_seq_length": 24}
    second |= {"do_predict": False, "predict_file": tmp / "one.txt", "doc_stride": 5, "tag_loss": "per_token"}
    made = [run("ner", tmp / "first", **first, **given), run("ner", tmp / "second", **second, **given)]
    assert [seen.status for seen in made] == [0, 0], [seen.error for seen in made]
    return made


@pytest.mark.parametrize(
    ("name", "get", "expected"),
    [
        ("train_file", lambda seen: seen.batch["token_ids"].max(), (7, 8)),  # w2, w3
        (
            "predict_file",
            lambda seen: [str(p)[-7:] for p in arguments(seen, "read_conll", "path")],
            (["one.txt", "two.txt"], ["two.txt"]),
        ),
        ("do_predict", lambda seen: (seen.folder / "predictions.txt").exists(), (True, False)),
        (
            "labels_file",
            lambda seen: (seen.folder / "labels.txt").read_text().split(),
            (["B-X", "O"], ["O", "B-Y", "B-X"]),
        ),
        ("tag_loss", lambda seen: seen.engine.objective.losses["loss"], ("num_sequences", "num_predictions")),
        ("doc_stride", lambda seen: {*arguments(seen, "make_tag_sequences", "doc_stride")}, ({64}, {5})),
        (
            "max_seq_length",
            lambda seen: {
                *arguments(seen, "make_tag_sequences", "max_seq_length"),
                *arguments(seen, "plan_updates", "max_seq_length"),
            },
            ({32}, {24}),
        ),
    ],
)
def test_a_setting_of_tagging_arrives(ner_runs, name, get, expected):
    """As of GLUE: those it shares with SQuAD go through the same function."""
    assert tuple(map(get, ner_runs)) == expected
    assert name in NerConfig.__annotations__ and len(NerConfig.__annotations__) == 7
