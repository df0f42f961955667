"""A ModernBERT by the commands: byte-level BPE, packs, fresh masks, audit, exports, and vectors."""

import dataclasses
import json

import numpy as np
import pytest
from byte_tokenizers import LINES, ours, roberta
from exports import run_export
from modern_bert_models import CONFIG
from recorded_calls import assert_refused, run

from bert_packed import cli
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, config_json, load_model_config
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.evaluation import inference
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights
from data_gen import create_pretraining_data, pack_tfrecords, verify_tfrecords
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig
from data_gen.verify_tfrecords import VerifyConfig

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
TEXTS = [*LINES, "", "Packs of cats."]
LENGTH = 64
CREATE = (create_pretraining_data.main, CreateConfig)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Packs of text, by the commands, and the model's config."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    documents = ["\n".join(rng.choice(LINES, 1 + n % 4)) for n in range(24)]
    (folder / "text.txt").write_text("\n\n".join(one.replace("\n\n", "\n") for one in documents))
    byte_bpe.save(roberta(), folder / "roberta.json")
    assert run(*CREATE, **creation_of(folder, folder / "instances")).status == 0
    given = {"output_dir": folder / "packed", "max_seq_length": LENGTH, "num_workers": 1, "num_shards": 1}
    inputs = {"input_file": f"{folder}/instances/*.tfrecord"}
    assert run(pack_tfrecords.main, PackConfig, **inputs, **given).status == 0
    packs = {"packed_file": f"{folder}/packed/*.tfrecord"}
    assert run(verify_tfrecords.main, VerifyConfig, **inputs, **packs).status == 0
    config = dataclasses.replace(CONFIG, vocab_size=336, max_position_embeddings=LENGTH)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    return folder


def read_config(path):
    """The config of a file, or of a run."""
    return starting_weights.read_config(path) if path.is_dir() else load_model_config(str(path))


def creation_of(folder, output_dir, **flags):
    """Flags of making records: dict."""
    return {
        "input_file": folder / "text.txt",
        "vocab_file": folder / "roberta.json",
        "output_dir": output_dir,
        "objective": "mlm",
        "tokenizer": "byte_bpe",
        "masked_lm_prob": 0.3,
        "max_seq_length": LENGTH // 2,
        "dupe_factor": 1,
        "num_workers": 1,
        **flags,
    }


def flags_of(files, folder, **flags):
    """Flags of a short pre-training: dict."""
    return {
        "input_file": f"{files}/packed/*.tfrecord",
        "output_dir": folder,
        "objective": "mlm",
        "bert_config_file": files / "config.json",
        "train_batch_size": 4,
        "micro_batch_size": 2,
        "num_train_steps": 1,
        "num_warmup_steps": 1,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "masking": "dynamic",
        "do_whole_word_mask": "true",
        **flags,
    }


def train(files, folder, **flags):
    return run(cli.pretrain, PretrainingConfig, **flags_of(files, folder, **flags))


def test_from_text_to_vectors(files, tmp_path):
    seen = train(files, tmp_path / "run")
    assert seen.status == 0 and "drawn again in every epoch, of 330 tokens" in seen.out, seen.error
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (files / "roberta.json").read_bytes()
    trained = checkpoint.read_weights(tmp_path / "run" / "checkpoint-1")
    config = read_config(tmp_path / "run")
    start = named_weights(build_model(MASKED_LM, config, 12345))
    assert trained.keys() == start.keys()
    assert all(np.any(trained[name] != weight.numpy()) for name, weight in start.items())
    rates = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout")
    assert [getattr(config, name) for name in rates] == [0.1] * 4
    assert run_export(init_checkpoint=tmp_path / "run", output_dir=tmp_path / "hf") == 0
    ids = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [ids[f"{name}_token_id"] for name in ("bos", "eos", "pad", "mask")] == [0, 2, 1, 4]
    # The tokenizer of the run, and of its export, is found beside the weights
    by_run, by_export = (inference.load_encoder(tmp_path / name, batch_size=2) for name in ("run", "hf"))
    assert (by_run.cls_id, by_run.sep_id) == (0, 2)
    num_tokens = [len(states) for states in by_run.encode(TEXTS[-2:], "none")]
    assert num_tokens == [2, 2 + len(roberta().encode("Packs of cats.").ids[1:-1])]
    vectors = by_run.encode(TEXTS)
    np.testing.assert_array_equal(by_export.encode(TEXTS), vectors)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_allclose(by_run.encode([text])[0], vector, atol=1e-5)
    # A run starts from it, with recomputed blocks, on records of its tokens alone
    again = {"init_checkpoint": tmp_path / "hf", "remat": "true"}
    assert train(files, tmp_path / "second", **again).status == 0
    byte_bpe.save(ours(), tmp_path / "hf" / "tokenizer.json")
    flags = flags_of(files, tmp_path / "third", **again)
    message = "must have the vocabulary of the records"
    assert_refused(cli.pretrain, PretrainingConfig, message, **flags)


@pytest.mark.slow
def test_the_audit_passes(files, tmp_path):
    config = read_config(files / "config.json")
    checkpoint.save_weights(tmp_path, named_weights(build_model(MASKED_LM, config, 0)), config)
    flags = {"input_file": f"{files}/packed/*.tfrecord", "init_checkpoint": tmp_path, "num_packs": 4}
    assert run(cli.audit, AuditConfig, **flags).status == 0


def test_context_and_angles_change_by_flag(files, tmp_path):
    """A checkpoint of short sequences goes on as the model whose config has the longer ones."""
    short = read_config(files / "config.json")
    long = dataclasses.replace(short, max_position_embeddings=8192, global_rope_theta=160000.0)
    checkpoint.save_weights(tmp_path / "start", named_weights(build_model(MASKED_LM, short, 0)), short)
    (tmp_path / "long.json").write_text(json.dumps(config_json(long)))
    flags = {"init_checkpoint": tmp_path / "start", "masking": "static", "do_whole_word_mask": "false"}
    flags |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trained = {}
    for name, changes in {
        "flag": {"max_position_embeddings": 8192, "global_rope_theta": 160000},
        "file": {"bert_config_file": tmp_path / "long.json"},
        "as it was": {},
    }.items():
        assert train(files, tmp_path / name, **flags, **changes).status == 0
        trained[name] = checkpoint.read_weights(tmp_path / name / "checkpoint-1")
    assert starting_weights.read_config(tmp_path / "flag") == long
    for name, weights in trained["file"].items():
        np.testing.assert_array_equal(trained["flag"][name], weights, err_msg=name)
    assert any(np.any(trained["as it was"][name] != weights) for name, weights in trained["file"].items())


def spoil(files, folder):
    """Write WordPieces, a tokenizer without a mask, and models that do not fit."""
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    byte_bpe.save(byte_bpe.train([LINES], 330), folder / "no_mask.json")
    short = dataclasses.replace(CONFIG, vocab_size=336, max_position_embeddings=20)
    (folder / "short.json").write_text(json.dumps(config_json(short)))
    other = dataclasses.replace(read_config(files / "config.json"), local_attention=128)
    checkpoint.save_weights(folder / "other", named_weights(build_model(MASKED_LM, other, 0)), other)
    byte_bpe.save(roberta(), folder / "other" / "tokenizer.json")


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("create", {"vocab_file": "{bad}/vocab.txt"}, "must be a tokenizer.json, as `tokenizers` writes it"),
        ("create", {"vocab_file": "{bad}/no_mask.json"}, "no_mask.json, without [CLS], [MASK], [PAD],"),
        ("train", {"vocab_file": "{bad}/vocab.txt"}, "must be the one that the records of `input_file` were"),
        (
            "train",
            {"init_checkpoint": "{bad}/other", "masking": "static", "do_whole_word_mask": "false"},
            "holds another model: local_attention must be 10. Received: 128.",
        ),
        ("train", {"bert_config_file": "{bad}/short.json"}, "must be at most max_position_embeddings=20"),
    ],
)
def test_a_mistake_is_one_line(files, tmp_path, command, flags, message):
    spoil(files, tmp_path)
    flags = {name: value.format(bad=tmp_path) for name, value in flags.items()}
    if command == "create":
        assert_refused(*CREATE, message, **creation_of(files, tmp_path / "out", **flags))
    else:
        given = flags_of(files, tmp_path / "out", **flags)
        assert_refused(cli.pretrain, PretrainingConfig, message, **given)
