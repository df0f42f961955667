"""SQuAD, GLUE and tags on a ModernBERT that reads bytes, by the commands of BERT."""

import dataclasses
import json

import numpy as np
import pytest
from byte_tokenizers import LINES, ours, roberta
from exports import run_export
from modern_bert_models import CONFIG
from run_logs import losses_of
from squad_files import QUESTIONS, write
from test_modern_bert_runs import run

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, config_json
from bert_packed.checkpoints import checkpoint
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.usefixtures("uncompiled")
COMMANDS = {
    "squad": (cli.squad, SquadConfig),
    "glue": (cli.fine_tune, GlueConfig),
    "ner": (cli.fine_tune, NerConfig),
}
PREDICTIONS = {"squad": "predictions.json", "glue": "predictions.tsv", "ner": "predictions.txt"}
LENGTH = 64


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small data of the three tasks, a pre-trained checkpoint with its tokenizer, and other vocabularies."""
    folder = tmp_path_factory.mktemp("files")
    write(folder / "questions.json", *QUESTIONS)
    (folder / "RTE").mkdir()
    rows = [
        f"{number}\t{LINES[number % 4][:40].strip()!r}\t Packs of cats \t{('not_', '')[number % 2]}entailment"
        for number in range(12)
    ]
    for name in ("train.tsv", "dev.tsv"):
        (folder / "RTE" / name).write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")
    sentences = [[f"{word} {'B-CAT' if 'cat' in word else 'O'}" for word in line.split()] for line in LINES]
    (folder / "words.txt").write_text("\n\n".join("\n".join(words) for words in sentences) + "\n")
    config = dataclasses.replace(
        CONFIG,
        vocab_size=336,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        classifier_pooling="mean",
    )
    for name in ("start", "bare"):
        checkpoint.save_weights(folder / name, named_weights(build_model(MASKED_LM, config, 0)), config)
    byte_bpe.save(ours(), folder / "start" / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    byte_bpe.save(roberta(), folder / "other.json")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    return folder


def finetune(task, files, folder, **flags):
    given = {
        "init_checkpoint": files / "start",
        "output_dir": folder,
        "max_seq_length": LENGTH,
        "train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "log_steps": 1,
        **{
            "squad": {"doc_stride": 16, "max_query_length": 48, "predict_file": files / "questions.json"},
            "glue": {"task_name": "RTE", "data_dir": files / "RTE"},
            "ner": {"predict_file": files / "words.txt", "doc_stride": 16, "num_train_epochs": 3},
        }[task],
    }
    train = {"squad": "questions.json", "ner": "words.txt"}
    if task in train and flags.get("do_train") != "false":
        given["train_file"] = files / train[task]
    return run(*COMMANDS[task], **{**given, **flags})


@pytest.mark.parametrize("task", COMMANDS)
def test_a_run_and_what_becomes_of_it(task, files, tmp_path, capsys):
    name = PREDICTIONS[task]
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    assert finetune(task, files, packed) == 0
    assert (
        f"{files}/start/tokenizer.json, {ours().get_vocab_size()} tokens; the model"
        in capsys.readouterr().out
    )
    assert (packed / "tokenizer.json").read_bytes() == (files / "start/tokenizer.json").read_bytes()
    assert not (packed / "vocab.txt").exists()
    # Packed is unpacked
    assert finetune(task, files, unpacked, max_sequences_per_pack=1) == 0
    assert "packing factor 1.000" in capsys.readouterr().out
    losses = losses_of(packed)
    assert len(losses) >= 2 and losses == pytest.approx(losses_of(unpacked), rel=1e-4)
    assert (packed / name).read_bytes() == (unpacked / name).read_bytes()
    # Predicted again from the run, from its checkpoint and from its export, whatever is said of case
    assert run_export(init_checkpoint=packed, output_dir=tmp_path / "hf", format="hf") == 0
    (last,) = packed.glob("checkpoint-*")
    starts = (packed, last, tmp_path / "hf")
    for number, start in enumerate(starts if task == "glue" else starts[2:]):
        again = tmp_path / f"again-{number}"
        flags = {
            "init_checkpoint": start,
            "do_train": "false",
            "do_lower_case": ["true", "false"][number % 2],
        }
        assert finetune(task, files, again, **flags) == 0
        assert (again / name).read_bytes() == (packed / name).read_bytes()
    if task == "squad":
        contexts = [context for context, _ in QUESTIONS]
        answers = json.loads((packed / name).read_text()).values()
        assert all(any(answer in context for context in contexts) for answer in answers)
        assert all(answer and answer == answer.strip() for answer in answers)
    if task == "ner":
        written = [line.split()[:2] for line in (packed / name).read_text().splitlines()]
        given = [line.split() for line in (files / "words.txt").read_text().splitlines()]
        assert written == [*given, []]


def test_a_stopped_run_goes_on(files, tmp_path):
    """The tokenizer is of its own folder when the folder of the start is gone."""
    flags = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 9}
    assert finetune("glue", files, tmp_path / "whole", **flags) == 0
    weights = checkpoint.read_weights(tmp_path / "whole" / "checkpoint-3")
    for path in (tmp_path / "whole").glob("checkpoint-[23]/*"):
        path.unlink()
    assert finetune("glue", files, tmp_path / "whole", **flags) == 0
    again = checkpoint.read_weights(tmp_path / "whole" / "checkpoint-3")
    assert all(np.array_equal(again[name], values) for name, values in weights.items())


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    """What a run leaves for a later one to read: no step is needed for that."""
    folder = tmp_path_factory.mktemp("tuned")
    assert finetune("glue", files, folder / "run", num_train_epochs=0.1) == 0
    assert run_export(init_checkpoint=folder / "run", output_dir=folder / "hf", format="hf") == 0
    return folder


@pytest.mark.parametrize("task", COMMANDS)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"init_checkpoint": "{tuned}/run", "vocab_file": "{files}/other.json"}, "must be the one that"),
        ({"init_checkpoint": "{tuned}/run", "vocab_file": "{files}/vocab.txt"}, "must be the one that"),
        (
            {"init_checkpoint": "{tuned}/hf", "vocab_file": "{files}/other.json"},
            "must have the tokens of {tuned}",
        ),
        ({"vocab_file": "{files}/other.json", "init_checkpoint": "{files}/none"}, "must be a folder"),
        (
            {"bert_config_file": "bert-tiny", "vocab_file": "{files}/other.json"},
            "must have one WordPiece a line for a BERT",
        ),
        ({"init_checkpoint": "{files}/bare"}, "where no vocab.txt or tokenizer.json is beside"),
    ],
)
def test_other_tokens_are_refused_in_one_line(task, flags, message, files, tuned, tmp_path, capsys):
    places = {"files": files, "tuned": tuned}
    flags = {name: value.format(**places) for name, value in flags.items()}
    assert finetune(task, files, tmp_path / "run", **flags) == 2
    error = capsys.readouterr().err
    assert message.format(**places) in error and error.count("\n") == 1
    assert not list(tmp_path.glob("run/checkpoint-*"))
