"""A ModernBERT goes through the commands: trained, audited, exported, fine-tuned, and for vectors."""

import dataclasses
import json

import numpy as np
import pytest
from encoder_files import TEXTS, WORDS
from exports import run_export
from modern_bert_models import CONFIG
from packs import VOCAB_SIZE
from squad_files import CONTEXT, entry, write
from tiny import MAX_SEQ_LENGTH, write_data

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, config_json
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core import command_line
from bert_packed.evaluation import inference
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]


def run(main, config_class, **flags):
    argv = ["program", *(f"--{name}={value}" for name, value in flags.items())]
    return command_line.run(main, config_class, argv)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Packs, the model's config and a vocabulary."""
    folder = tmp_path_factory.mktemp("files")
    write_data(folder)
    (folder / "config.json").write_text(json.dumps(config_json(CONFIG)))
    vocabulary = [*SPECIAL_TOKENS, *WORDS]
    assert len(vocabulary) == VOCAB_SIZE
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return folder


def pretrain(files, folder, **flags):
    given = {
        "input_file": f"{files}/*.tfrecord",
        "output_dir": folder,
        "objective": "mlm",
        "bert_config_file": files / "config.json",
        "train_batch_size": 4,
        "micro_batch_size": 2,
        "num_train_steps": 2,
        "num_warmup_steps": 1,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    return run(cli.pretrain, PretrainingConfig, **{**given, **flags})


@pytest.mark.slow  # test_modern_bert_text.py trains, exports and loads too
def test_the_commands(files, tmp_path):
    assert pretrain(files, tmp_path / "run") == 0
    trained = checkpoint.read_weights(tmp_path / "run" / "checkpoint-2")
    start = named_weights(build_model(MASKED_LM, CONFIG, 12345))
    assert trained.keys() == start.keys()
    assert all(np.any(trained[name] != weight.numpy()) for name, weight in start.items())
    rates = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout")
    stored = starting_weights.read_config(tmp_path / "run")
    assert [getattr(stored, name) for name in rates] == [0.1] * 4
    # Packed is unpacked
    flags = {"input_file": f"{files}/*.tfrecord", "init_checkpoint": tmp_path / "run", "num_packs": 4}
    assert run(cli.audit, AuditConfig, **flags) == 0
    # Out, and in again with recomputed blocks
    flags = {"init_checkpoint": tmp_path / "run", "vocab_file": files / "vocab.txt"}
    assert run_export(**flags, output_dir=tmp_path / "hf") == 0
    assert pretrain(files, tmp_path / "second", init_checkpoint=tmp_path / "hf", remat="true") == 0
    encoder = inference.load_encoder(tmp_path / "hf", files / "vocab.txt", max_seq_length=MAX_SEQ_LENGTH)
    together = encoder.encode(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(encoder.encode([text])[0], vector, atol=1e-5)


def test_it_is_fine_tuned(files, tmp_path):
    checkpoint.save_weights(tmp_path / "ours", named_weights(build_model(MASKED_LM, CONFIG, 0)), CONFIG)
    write(tmp_path / "questions.json", (CONTEXT, [entry("1", "Who wrote it?", "Ada Lovelace")]))
    flags = {
        "init_checkpoint": tmp_path / "ours",
        "output_dir": tmp_path / "squad",
        "vocab_file": files / "vocab.txt",
        "train_file": tmp_path / "questions.json",
        "do_predict": "false",
        "max_seq_length": MAX_SEQ_LENGTH,
        "max_query_length": 8,
        "doc_stride": 4,
        "train_batch_size": 2,
        "num_train_epochs": 1,
    }
    assert run(cli.squad, SquadConfig, **flags) == 0
    assert starting_weights.stored_head(tmp_path / "squad")[0] == "question_answering"


def test_context_and_angles_change_by_flag(files, tmp_path):
    """A checkpoint of short sequences goes on as the model whose config has the longer ones."""
    short = dataclasses.replace(CONFIG, max_position_embeddings=MAX_SEQ_LENGTH)
    long = dataclasses.replace(short, max_position_embeddings=8192, global_rope_theta=160000.0)
    checkpoint.save_weights(tmp_path / "short", named_weights(build_model(MASKED_LM, short, 0)), short)
    for name, config in (("short", short), ("long", long)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config_json(config)))
    by_flag = {"max_position_embeddings": 8192, "global_rope_theta": 160000}
    trained = {}
    for name, model, flags in (("flag", "short", by_flag), ("file", "long", {}), ("as_was", "short", {})):
        flags |= {"bert_config_file": tmp_path / f"{model}.json", "init_checkpoint": tmp_path / "short"}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        assert pretrain(files, tmp_path / name, **rates, **flags) == 0
        trained[name] = checkpoint.read_weights(tmp_path / name / "checkpoint-2")
    assert starting_weights.read_config(tmp_path / "flag") == long
    for name, weights in trained["file"].items():
        np.testing.assert_array_equal(trained["flag"][name], weights, err_msg=name)
    assert any(np.any(trained["as_was"][name] != weights) for name, weights in trained["file"].items())


@pytest.mark.parametrize("name", ["max_position_embeddings", "global_rope_theta"])
def test_a_bert_cannot_change_its_context(files, tmp_path, capsys, name):
    flags = {"bert_config_file": "bert-tiny", name: 8192}
    assert pretrain(files, tmp_path / "run", **flags) == 2
    error = capsys.readouterr().err
    assert f"`{name}` must be 0 for a BERT, which cannot change it. Received: 8192" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"objective": "mlm_nsp"}, "must be a BERT for objective=mlm_nsp. Received: a ModernBERT."),
        ({"init_checkpoint": "{other}"}, "holds another model: local_attention must be 10. Received: 128."),
    ],
)
def test_what_it_cannot_is_refused_in_one_line(files, tmp_path, capsys, flags, message):
    other = dataclasses.replace(CONFIG, local_attention=128)
    checkpoint.save_weights(tmp_path / "other", named_weights(build_model(MASKED_LM, other, 0)), other)
    flags = {name: value.format(other=tmp_path / "other") for name, value in flags.items()}
    assert pretrain(files, tmp_path / "run", **flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
