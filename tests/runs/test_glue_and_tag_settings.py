"""The flags that GLUE and tagging have of their own arrive where they work.

Those that they share with SQuAD go through the same function, `run_task`.
"""

import pytest
from finetuning_runs import arguments, run, write_files

from bert_packed.runs.finetuning_config import GlueConfig, NerConfig
from bert_packed.tasks import glue

OWN_OF_GLUE = list(GlueConfig.__annotations__)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


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
    """Its own flags; those it shares with SQuAD go through the same function, `run_task`."""
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
