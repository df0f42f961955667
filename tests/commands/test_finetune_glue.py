"""`finetune_glue` from file to score on a tiny model, for classes and for numbers, packed and unpacked."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from tiny import CONFIG

from bert_packed import finetune_glue
from bert_packed.runs.finetuning_config import GlueConfig
from data_gen.cli.command_line import run
from data_gen.text import tokenization

WORDS = ("good", "fine", "bad", "poor", "film", "play", "the", "a", "was", "very")


def command(**flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return run(finetune_glue.main, GlueConfig, "", ["finetune_glue", *arguments])


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


def losses_of(folder):
    with (folder / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


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
    assert scores[score] > 0.8  # one word tells
    with (tmp_path / "depth_max" / "predictions.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    predicted = np.array([float(row["prediction"]) for row in rows])
    true = np.arange(10) % 2
    assert [row["index"] for row in rows] == [str(index) for index in range(10)]
    plain = {"accuracy": np.mean(predicted == true), "pearson": np.corrcoef(predicted, 5.0 * true)[0, 1]}
    assert scores[score] == pytest.approx(plain[score], abs=1e-5)


def test_mistakes_are_one_line(data, tmp_path, capsys):
    for change, message in (
        ({"task_name": ""}, "`task_name` must be one of CoLA, SST-2, MRPC, RTE, WNLI, STS-B"),
        ({"task_name": "MNLI"}, "MNLI"),
        ({"data_dir": ""}, "`data_dir` must be given"),
        ({"data_dir": tmp_path}, "dev.tsv must exist"),
        ({"task_name": "RTE"}, "dev.tsv must have a column 'sentence1'"),
    ):
        assert command(**{**flags_of(data, "SST-2", tmp_path / "run"), **change}) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1
