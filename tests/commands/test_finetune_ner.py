"""`finetune_ner` from file to entities on a tiny model: packed as unpacked, stopped as uninterrupted."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from exports import run_export
from run_logs import losses_of
from safetensors.numpy import load_file
from tiny import CONFIG

from bert_packed import cli
from bert_packed.core.command_line import run
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.ner.scores import score
from bert_packed.text import tokenization

WORDS = {"O": ("the", "a", "saw", "went", "to"), "PER": ("ada", "bob"), "LOC": ("rome", "york")}
LABELS = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


def command(**flags):
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return run(cli.fine_tune, NerConfig, ["finetune_ner", *arguments])


def write_conll(path, num_sentences, seed, long_one=False):
    rng = np.random.default_rng(seed)
    lines = ["-DOCSTART- -X- O", ""]
    for number in range(num_sentences):
        previous = "O"
        for _ in range(30 if long_one and number == 2 else rng.integers(1, 8)):
            kind = str(rng.choice(["O", "O", "PER", "LOC"]))
            tag = kind if kind == "O" else f"{'I' if kind == previous else 'B'}-{kind}"
            previous = kind
            lines.append(f"{rng.choice(WORDS[kind])} X {tag}")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags of a tiny run: every word is always tagged alike, but for B- and I-."""
    folder = tmp_path_factory.mktemp("ner")
    words = sorted(word for kind in WORDS.values() for word in kind)
    vocabulary = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *words))
    tokenization.save_vocab(vocabulary, folder / "vocab.txt")
    model = dataclasses.replace(CONFIG, vocab_size=len(vocabulary), num_hidden_layers=1)
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(model)))
    return {
        "train_file": write_conll(folder / "train.txt", 40, 0, long_one=True),
        "predict_file": write_conll(folder / "dev.txt", 12, 1, long_one=True),
        "vocab_file": folder / "vocab.txt",
        "bert_config_file": folder / "bert_config.json",
        "max_seq_length": 24,
        "doc_stride": 8,
        "train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "log_steps": 1,
        "save_checkpoints_steps": 4,
        "keep_checkpoint_max": 9,
    }


def read_columns(path):
    """Sentences of columns of a predictions file."""
    return [[line.split(" ") for line in part.split("\n")] for part in path.read_text().strip().split("\n\n")]


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_run_and_what_becomes_of_it(data, tmp_path, capsys):
    packed, unpacked, stopped = (tmp_path / name for name in ("packed", "unpacked", "stopped"))
    assert command(**data, output_dir=packed, json=tmp_path / "scores.json") == 0
    text = capsys.readouterr().out
    assert "1 sentences cut into windows" in text and "labels     5: B-LOC, B-PER, I-LOC, I-PER, O" in text
    assert (packed / "labels.txt").read_text().split() == LABELS

    # What it writes is the file again, with a tag more; the scores are those of what it writes
    columns = read_columns(packed / "predictions.txt")
    source = [line.split() for line in data["predict_file"].read_text().splitlines()[2:]]
    assert [row[:2] for part in columns for row in part] == [[row[0], row[2]] for row in source if row]
    assert {row[2] for part in columns for row in part} <= set(LABELS)
    scores = json.loads((tmp_path / "scores.json").read_text())
    tags = [[[row[column] for row in part] for part in columns] for column in (1, 2)]
    assert scores == pytest.approx(score(*tags)) and len(columns) == 12
    assert scores == json.loads((packed / "eval_results.json").read_text())
    assert scores["accuracy"] > 0.6 and {"precision", "recall", "f1", "f1_PER", "f1_LOC"} <= set(scores)

    assert command(**data, output_dir=unpacked, max_sequences_per_pack=1) == 0
    assert "packing factor 1.000" in capsys.readouterr().out
    losses = losses_of(packed)
    np.testing.assert_allclose(losses, losses_of(unpacked), rtol=1e-3)
    assert losses[-1] < 0.7 * losses[0]
    assert json.loads((unpacked / "eval_results.json").read_text()) == pytest.approx(scores, abs=1e-6)

    shutil.copytree(packed, stopped)
    last = max(packed.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])).name
    shutil.rmtree(stopped / last)
    (stopped / "predictions.txt").unlink()
    assert command(**data, output_dir=stopped) == 0
    assert "continues from" in capsys.readouterr().out
    for name in ("model.safetensors", "training.safetensors"):
        one, other = (load_file(path / last / name) for path in (packed, stopped))
        assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
    assert losses_of(stopped) == losses
    assert (stopped / "predictions.txt").read_bytes() == (packed / "predictions.txt").read_bytes()

    # Tagged without training, from the run and from an export, words without tags
    bare = tmp_path / "bare.txt"
    bare.write_text("\n".join(line.split(" ")[0] for line in data["predict_file"].read_text().split("\n")))
    export = {"vocab_file": data["vocab_file"], "output_dir": tmp_path / "hf", "format": "hf"}
    assert run_export(init_checkpoint=packed, **export) == 0
    for start in (packed, packed / last, tmp_path / "hf"):
        flags = {"init_checkpoint": start, "predict_file": bare, "do_train": "false", "doc_stride": 8}
        assert command(**flags, max_seq_length=24, output_dir=tmp_path / "out") == 0
        found = read_columns(tmp_path / "out" / "predictions.txt")
        assert found == [[[row[0], row[2]] for row in part] for part in columns]
        assert not (tmp_path / "out" / "eval_results.json").exists()


def test_mistakes_are_one_line(data, tmp_path, capsys):
    bare, labels = tmp_path / "bare.txt", tmp_path / "labels.txt"
    bare.write_text("word\n")
    labels.write_text("O\nB-PER\n")
    for change, message in (
        ({"train_file": bare}, "bare.txt must have a tag in its last column. Received: one column"),
        ({"labels_file": labels}, "the tag must be one of O, B-PER"),
        ({"tag_loss": "sum"}, "tag_loss"),
    ):
        assert command(**{**data, "output_dir": tmp_path / "run", **change}) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("checkpoint-*"))
