"""`finetune_glue` of all tasks: scores, files for the server, and what is left to do after a kill."""

import csv
import json
import shutil

import numpy as np
import pytest
from task_files import finetune, write_tasks

WORDS = ("cats", "packs", "more", "isn't", "the", "of", "and", "a")
LABELS = {"MNLI": ("entailment", "neutral", "contradiction"), "QQP": ("0", "1")}
COLUMNS = {
    "STS-B": ("sentence1", "sentence2", "score"),
    "QQP": ("question1", "question2", "is_duplicate"),
    "MNLI": ("sentence1", "sentence2", "gold_label"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A start, and tiny files of STS-B, QQP and MNLI; those to be predicted are dev, backwards."""
    files = write_tasks(tmp_path_factory.mktemp("files"))
    folder, rng = files / "all", np.random.default_rng(1)
    folder.mkdir()

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(1, 6)))

    def write(task, name, rows, with_label=True):
        path = folder / task / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        kept = COLUMNS[task] if with_label else COLUMNS[task][:2]
        lines = ["\t".join(("index", *kept)), *("\t".join((str(i), *row[: len(kept)])) for i, row in rows)]
        path.write_text("".join(f"{line}\n" for line in lines))

    for task in COLUMNS:
        for ending in ("_matched", "_mismatched") if task == "MNLI" else ("",):
            rows = [
                (text(), text(), rng.choice(LABELS[task]) if task in LABELS else f"{rng.uniform(0, 5):.3f}")
                for _ in range(9)
            ]
            write(task, f"dev{ending}", list(enumerate(rows)))
            write(task, f"test{ending}", list(enumerate(rows[::-1])), with_label=False)
        write(task, "train", list(enumerate(rows)))
    (folder / "diagnostic").mkdir()
    shutil.copy(folder / "MNLI/test_matched.tsv", folder / "diagnostic/diagnostic.tsv")
    return files


def read_predictions(path):
    """The labels of a file that has a header and an index and a label a line, as the server wants it."""
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
def test_all_tasks(files, tmp_path):
    out, data = tmp_path / "out", files / "all"
    flags = {"task_name": "all", "data_dir": data, "do_predict": "true", "json": tmp_path / "scores.json"}

    def run(output_dir=out, **changes):
        return finetune("glue", files, output_dir, **{**flags, **changes})

    table = run().out
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores == json.loads((out / "eval_results.json").read_text())
    assert list(scores) == ["STS-B", "QQP", "MNLI", "average"]
    assert set(scores["MNLI"]) == {"accuracy_matched", "accuracy_mismatched"}
    means = [np.mean(list(scores[task].values())) for task in ("STS-B", "QQP", "MNLI")]
    assert scores["average"] == pytest.approx(np.mean(means))
    assert "3 of 9 tasks" in table and "accuracy_mismatched" in table

    pairs = [("STS-B", "STS-B", ""), ("QQP", "QQP", "")]
    pairs += [("MNLI", "MNLI-m", "_matched"), ("MNLI", "MNLI-mm", "_mismatched")]
    for task, name, ending in pairs:
        found = read_predictions(out / task / f"{name}.tsv")
        dev = read_predictions(out / task / f"predictions{ending}.tsv")
        with (data / task / f"dev{ending}.tsv").open() as file:
            true = [line.rstrip("\n").split("\t")[-1] for line in file][1:]
        if task == "STS-B":
            dev, found, true = (np.array(values, float) for values in (dev, found, true))
            np.testing.assert_allclose(found, dev.clip(0, 5)[::-1])
            assert scores[task]["pearson"] == pytest.approx(np.corrcoef(dev, true)[0, 1], abs=1e-4)
        else:
            assert set(found) <= set(LABELS[task]) and found == dev[::-1]
            accuracy = np.mean([one == other for one, other in zip(dev, true, strict=True)])
            assert scores[task][f"accuracy{ending}"] == pytest.approx(accuracy)
    assert read_predictions(out / "MNLI" / "AX.tsv") == read_predictions(out / "MNLI" / "MNLI-m.tsv")
    assert len({*read_predictions(out / "STS-B" / "STS-B.tsv")}) > 3  # so that their order shows

    # A run killed in the third task does not do the second again, and continues the third, bit for bit
    before, third = snapshot(out), out / "MNLI"
    shutil.rmtree(third / "checkpoint-4")
    for path in (out / "eval_results.json", third / "eval_results.json", *third.glob("*.tsv")):
        path.unlink()
    shown = run().out
    assert shown.count("has its results") == 2 and f"continues from {third / 'checkpoint-2'}" in shown
    after = snapshot(out)
    assert after.keys() == before.keys()
    for path, (content, time) in before.items():
        if path.name not in ("run.json", "metrics.csv"):  # with times, and where it went on
            assert after[path][0] == content, path
        if out / "QQP" in path.parents:
            assert after[path][1] == time, path

    # Another dev.tsv is scored, another learning rate refused, before anything is done
    (data / "QQP" / "dev.tsv").touch()
    assert run().out.count("has its results") == 2
    assert "learning_rate 0.01 -> 0.02" in run(learning_rate=0.02).error
    # A task of all is the run that it would be alone
    assert run(out / "QQP", task_name="QQP", data_dir=data / "QQP").status == 0
    assert "`output_dir` must not be one task's run" in run(out / "QQP").error
    assert run(tmp_path / "again", do_train="false", init_checkpoint=out).status == 0
    assert json.loads((tmp_path / "again" / "eval_results.json").read_text()) == scores
