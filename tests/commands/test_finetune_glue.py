"""`finetune_glue` from file to score on a tiny model, for classes and for numbers, packed and unpacked."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
from run_logs import losses_of
from tiny import CONFIG

from bert_packed import cli
from bert_packed.core.command_line import run
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.text import tokenization

WORDS = ("good", "fine", "bad", "poor", "film", "play", "the", "a", "was", "very")


def command(**flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return run(cli.fine_tune, GlueConfig, ["finetune_glue", *arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a model, a vocabulary, and tiny files of SST-2 and STS-B."""
    folder = tmp_path_factory.mktemp("glue")
    vocabulary = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *WORDS))
    tokenization.save_vocab(vocabulary, folder / "vocab.txt")
    model = dataclasses.replace(CONFIG, vocab_size=len(vocabulary), num_hidden_layers=1)
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(model)))
    rng = np.random.default_rng(0)
    for name, header in (("SST-2", "sentence\tlabel\n"), ("STS-B", "sentence1\tsentence2\tscore\n")):
        (folder / name).mkdir()
        for split, number in (("train", 24), ("dev", 10)):
            lines = [header]
            for index in range(number):
                texts = [" ".join(rng.choice(WORDS[4:], rng.integers(1, 5))) for _ in range(2)]
                label = index % 2
                first = f"{texts[0]} {rng.choice(WORDS[:2] if label else WORDS[2:4])}"
                lines.append(
                    f"{first}\t{label}\n" if name == "SST-2" else f"{first}\t{texts[1]}\t{label * 5.0}\n"
                )
            (folder / name / f"{split}.tsv").write_text("".join(lines))
    return folder


def flags_of(data, task, output, **more):
    return {
        "task_name": task,
        "data_dir": data / task,
        "output_dir": output,
        "vocab_file": data / "vocab.txt",
        "bert_config_file": data / "bert_config.json",
        "max_seq_length": 24,
        "train_batch_size": 8,
        "num_train_epochs": 10,
        "learning_rate": 0.01,
        "log_steps": 5,
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("task", "score"), [("SST-2", "accuracy"), ("STS-B", "pearson")])
def test_packed_equals_unpacked(data, tmp_path, task, score):
    found = {}
    for depth in ("max", 1):
        out = tmp_path / f"depth_{depth}"
        json_file = tmp_path / f"{depth}.json"
        flags = flags_of(data, task, out, max_sequences_per_pack=depth, json=json_file)
        assert command(**flags) == 0
        found[depth] = (losses_of(out), json.loads(json_file.read_text()))
    (packed, scores), (unpacked, unpacked_scores) = found["max"], found[1]
    np.testing.assert_allclose(packed, unpacked, rtol=1e-3)
    assert len(packed) == 6 and packed[-1] < 0.8 * packed[0]
    assert scores == pytest.approx(unpacked_scores, abs=1e-3)
    assert scores == json.loads((tmp_path / "depth_max" / "eval_results.json").read_text())
    assert scores[score] > 0.8  # one word gives the class
    with (tmp_path / "depth_max" / "predictions.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    predicted = np.array([float(row["prediction"]) for row in rows])
    true = np.arange(10) % 2
    assert [row["index"] for row in rows] == [str(index) for index in range(10)]
    plain = {"accuracy": np.mean(predicted == true), "pearson": np.corrcoef(predicted, 5.0 * true)[0, 1]}
    assert scores[score] == pytest.approx(plain[score], abs=1e-5)


LABELS = {"MNLI": ("entailment", "neutral", "contradiction"), "QQP": ("0", "1")}


@pytest.fixture(scope="module")
def all_data(tmp_path_factory):
    """A folder with tiny files of STS-B, QQP and MNLI; what is to be predicted is dev, backwards."""
    folder = tmp_path_factory.mktemp("all")
    rng = np.random.default_rng(1)
    headers = {
        "STS-B": ("sentence1", "sentence2", "score"),
        "QQP": ("question1", "question2", "is_duplicate"),
    }
    headers["MNLI"] = ("sentence1", "sentence2", "gold_label")

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(1, 6)))

    def write(task, name, rows, with_label=True):
        path = folder / task / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        kept = headers[task] if with_label else headers[task][:2]
        lines = ["\t".join(("index", *kept)), *("\t".join((str(i), *row[: len(kept)])) for i, row in rows)]
        path.write_text("".join(f"{line}\n" for line in lines))

    for task in headers:
        for ending in ("_matched", "_mismatched") if task == "MNLI" else ("",):
            rows = [
                (text(), text(), rng.choice(LABELS[task]) if task in LABELS else f"{rng.uniform(0, 5):.3f}")
                for _ in range(9)
            ]
            write(task, f"dev{ending}", list(enumerate(rows)))
            write(task, f"test{ending}", list(enumerate(rows[::-1])), with_label=False)
        write(task, "train", list(enumerate(rows)))
    (folder / "diagnostic").mkdir()
    (folder / "diagnostic" / "diagnostic.tsv").write_bytes(
        (folder / "MNLI" / "test_matched.tsv").read_bytes()
    )
    return folder


def read_predictions(path):
    """By the server's rules: a header, then an index and a label a line, nothing else."""
    with path.open() as file:
        header, *rows = csv.reader(file, delimiter="\t")
    assert header == ["index", "prediction"]
    assert [index for index, _ in rows] == [str(number) for number in range(9)]
    return [label for _, label in rows]


def snapshot(folder):
    own_of_a_process = {"tensorboard", ".lock"}
    paths = [path for path in folder.rglob("*") if path.is_file() and not own_of_a_process & {*path.parts}]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_all_tasks_predictions_for_the_server_and_going_on(data, all_data, tmp_path, capsys):
    out = tmp_path / "out"
    flags = flags_of(data, "all", out, do_predict="true", num_train_epochs=4, save_checkpoints_steps=2)
    flags |= {"data_dir": all_data, "keep_checkpoint_max": 9, "json": tmp_path / "scores.json"}
    assert command(**flags) == 0
    table = capsys.readouterr().out
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores == json.loads((out / "eval_results.json").read_text())
    assert list(scores) == ["STS-B", "QQP", "MNLI", "average"]
    assert set(scores["MNLI"]) == {"accuracy_matched", "accuracy_mismatched"}
    means = [np.mean(list(scores[task].values())) for task in ("STS-B", "QQP", "MNLI")]
    assert scores["average"] == pytest.approx(np.mean(means))
    assert "3 of 9 tasks" in table and "accuracy_mismatched" in table

    pairs = [("QQP", "QQP", ""), ("MNLI", "MNLI-m", "_matched"), ("MNLI", "MNLI-mm", "_mismatched")]
    for task, name, ending in pairs:
        found = read_predictions(out / task / f"{name}.tsv")
        dev = read_predictions(out / task / f"predictions{ending}.tsv")
        assert set(found) <= set(LABELS[task]) and found == dev[::-1]
        with (all_data / task / f"dev{ending}.tsv").open() as file:
            true = [line.rstrip("\n").split("\t")[-1] for line in file][1:]
        accuracy = np.mean([one == other for one, other in zip(dev, true, strict=True)])
        assert scores[task][f"accuracy{ending}"] == pytest.approx(accuracy)
    assert read_predictions(out / "MNLI" / "AX.tsv") == read_predictions(out / "MNLI" / "MNLI-m.tsv")
    assert len({*read_predictions(out / "MNLI" / "MNLI-m.tsv")}) > 1
    dev = np.array(read_predictions(out / "STS-B" / "predictions.tsv"), float)
    found = np.array(read_predictions(out / "STS-B" / "STS-B.tsv"), float)
    np.testing.assert_allclose(found, dev.clip(0, 5)[::-1])

    # Killed in the third task: the second is not done again, the third continues, bit for bit
    before = snapshot(out)
    third = out / "MNLI"
    shutil.rmtree(third / "checkpoint-4")
    for path in (out / "eval_results.json", third / "eval_results.json", *third.glob("*.tsv")):
        path.unlink()
    assert command(**flags) == 0
    text = capsys.readouterr().out
    assert text.count("has its results") == 2 and f"continues from {third / 'checkpoint-2'}" in text
    after = snapshot(out)
    assert after.keys() == before.keys()
    for path, (content, time) in before.items():
        if path.name not in ("run.json", "metrics.csv"):  # with times, and where it went on
            assert after[path][0] == content, path
        if out / "QQP" in path.parents:
            assert after[path][1] == time, path
    segments = json.loads((third / "run.json").read_text())["segments"]
    assert [segment["first_step"] for segment in segments] == [0, 2]

    # Another dev.tsv is scored, another learning rate refused, before anything is done
    (all_data / "QQP" / "dev.tsv").touch()
    assert command(**flags) == 0
    assert capsys.readouterr().out.count("has its results") == 2
    assert command(**{**flags, "learning_rate": 0.02}) == 2
    assert "learning_rate 0.01 -> 0.02" in capsys.readouterr().err
    one = {**flags, "task_name": "QQP", "data_dir": all_data / "QQP", "output_dir": out / "QQP"}
    assert command(**one) == 0  # a task of all is the run that it would be alone
    assert command(**{**flags, "output_dir": out / "QQP"}) == 2
    assert "`output_dir` must not be one task's run" in capsys.readouterr().err
    untrained = {**flags, "do_train": "false", "init_checkpoint": out, "output_dir": tmp_path / "again"}
    assert command(**{**untrained, "vocab_file": "", "bert_config_file": ""}) == 0
    assert json.loads((tmp_path / "again" / "eval_results.json").read_text()) == scores


def test_mistakes_are_one_line(data, tmp_path, capsys):
    for change, message in (
        ({"task_name": "XNLI"}, "XNLI"),
        ({"task_name": "all", "data_dir": tmp_path}, "`data_dir` must hold a task's folder, such as CoLA"),
        ({"task_name": "MNLI"}, "dev_matched.tsv must exist"),
        ({"do_predict": "true"}, "test.tsv must exist"),
    ):
        assert command(**{**flags_of(data, "SST-2", tmp_path / "run"), **change}) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1
