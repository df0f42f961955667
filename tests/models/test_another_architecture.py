"""A third architecture, defined by this test, goes through every command: one model, one table, one line.

Each token sees its sequence's mean, through a gate. The package has no word of it.

Legend: B packs per batch, S pack length, D model width, V vocabulary.
"""

import dataclasses
import json

import keras
import numpy as np
import pytest
from encoder_files import TEXTS, WORDS
from exports import run_export
from keras import ops
from tiny import MAX_SEQ_LENGTH, write_data

import run_pretraining
import run_squad
from bert_packed import audit, config
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.checkpoints.tensor_names import CheckpointNames, TensorName
from bert_packed.config import MASKED_LM, ModelFamily, load_model_config
from bert_packed.core import command_line
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.evaluation import inference
from bert_packed.model_configs.base import BaseConfig
from bert_packed.models.context import PackContext
from bert_packed.models.cpu_gradients import Linear
from bert_packed.models.layers import gather_tokens
from bert_packed.models.packed_model import PackedModel, build_model
from bert_packed.models.rematerialisation import rematerialised
from bert_packed.runs.finetuning_config import SquadConfig
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled", "registered")]


# ---- what its file in models/, its table in checkpoints/ and its config would hold


@dataclasses.dataclass(frozen=True)
class GateConfig(BaseConfig):
    vocab_size: int = setting(31, "tokens in the vocabulary", minimum=1)
    hidden_size: int = setting(16, "width of every layer", minimum=1)
    num_hidden_layers: int = setting(1, "blocks", minimum=1)

    without_attention = "tokens see the mean of their sequence"

    def __post_init__(self):
        check_settings(self)


class GateBlock(keras.layers.Layer):
    def __init__(self, config, name):
        super().__init__(name=name)
        self.gate, self.mix = (Linear(config.hidden_size, name=part) for part in ("gate", "mix"))

    def build(self, hidden_shape):
        self.gate.build(hidden_shape)
        self.mix.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, context, training=None):
        own_BSS = ops.cast(context.mask_B1SS[:, 0], hidden_BSD.dtype)
        means_BSD = ops.matmul(own_BSS, hidden_BSD) / ops.sum(own_BSS, axis=-1, keepdims=True)
        return hidden_BSD + ops.sigmoid(self.gate(hidden_BSD)) * self.mix(means_BSD)


@keras.saving.register_keras_serializable(package="test")
class GateModel(PackedModel):
    config_class = GateConfig
    head = MASKED_LM

    def __init__(self, config, name="gates", remat=False):
        super().__init__(config, name)
        self.remat = remat
        self.blocks = [GateBlock(config, f"block_{i}") for i in range(config.num_hidden_layers)]

    def build_encoder(self):
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.table_VD = self.add_weight(shape=shape, initializer="random_normal", name="table")
        for block in self.blocks:
            block.build((None, None, self.config.hidden_size))

    def build_heads(self, hidden_shape):
        self.bias_V = self.add_weight(shape=(self.config.vocab_size,), initializer="zeros", name="bias")

    def embed(self, batch):
        return ops.take(self.table_VD, batch["token_ids"], axis=0)

    def encode(self, batch, training=None):
        return self.encode_embedded(self.embed(batch), batch, training)

    def encode_embedded(self, hidden_BSD, batch, training=False):
        context = PackContext(batch["sequence_ids"], batch["position_ids"])
        for block in self.blocks:
            if self.remat:
                hidden_BSD = rematerialised(block, hidden_BSD, context, training)
            else:
                hidden_BSD = block(hidden_BSD, context=context, training=training)
        return hidden_BSD

    def apply_heads(self, hidden_BSD, batch, training=None):
        gathered_BPD = gather_tokens(hidden_BSD, batch["prediction_positions"])
        return {"mlm_logits": ops.matmul(gathered_BPD, ops.transpose(self.table_VD)) + self.bias_V}


def make_model(head, config, num_outputs, remat=False):
    return GateModel(config, remat=remat)


def count_flops(head, config, sums):
    return 6 * 2 * config.hidden_size**2 * config.num_hidden_layers * sums["num_tokens"]


def tensor_names(config, head):
    table = [TensorName("table", "gates.embeddings.weight"), TensorName("bias", "head.bias")]
    for i in range(config.num_hidden_layers):
        for part in ("gate", "mix"):
            ours, theirs = f"block_{i}/{part}", f"gates.layers.{i}.{part}"
            table.append(TensorName(f"{ours}/kernel", f"{theirs}.weight", hugging_face_transposed=True))
            table.append(TensorName(f"{ours}/bias", f"{theirs}.bias"))
    return table


NAMES = CheckpointNames(
    tensor_names=tensor_names,
    outputs={MASKED_LM: TensorName("bias", "head.bias")},
    encoder="block_",
    classes={MASKED_LM: "GateForMaskedLM"},
    hugging_face_config=lambda model: config.config_json(model.config),
)


@pytest.fixture
def registered(monkeypatch):
    """The one line."""
    family = ModelFamily("Gate", GateConfig, {}, (MASKED_LM,), models=__name__, names=__name__)
    monkeypatch.setitem(config.FAMILIES, "gate", family)


# ---- and what it then can do


def run(main, config_class, **flags):
    argv = ["program", *(f"--{name}={value}" for name, value in flags.items())]
    return command_line.run(main, config_class, "", argv)


@pytest.fixture
def files(tmp_path):
    """Packs, the model's config and a vocabulary."""
    write_data(tmp_path)
    shape = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gate", **shape}))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return tmp_path


def pretrain(files, **flags):
    given = {
        "input_file": f"{files}/*.tfrecord",
        "output_dir": files / "run",
        "objective": "mlm",
        "bert_config_file": files / "config.json",
        "train_batch_size": 4,
        "micro_batch_size": 2,
        "num_train_steps": 2,
        "num_warmup_steps": 1,
        "remat": "true",
    }
    return run(run_pretraining.main, PretrainingConfig, **{**given, **flags})


def test_it_is_trained_audited_exported_opened_and_gives_vectors(files, capsys):
    assert pretrain(files) == 0
    assert "attention  none: tokens see the mean of their sequence" in capsys.readouterr().out
    trained, its_config = (
        checkpoint.read_weights(files / "run" / "checkpoint-2"),
        GateConfig(num_hidden_layers=2),
    )
    assert (
        starting_weights.read_config(files / "run") == load_model_config(files / "config.json") == its_config
    )
    start = named_weights(build_model(MASKED_LM, its_config, 12345))
    assert trained.keys() == start.keys()
    assert all(np.any(trained[name] != weight.numpy()) for name, weight in start.items())
    # It goes on, and packed is unpacked
    assert pretrain(files, num_train_steps=2) == 0
    data = {"input_file": f"{files}/*.tfrecord", "init_checkpoint": files / "run"}
    assert run(audit.main, audit.AuditConfig, **data, num_packs=4) == 0
    # Out and in again
    assert (
        run_export(init_checkpoint=files / "run", output_dir=files / "hf", vocab_file=files / "vocab.txt")
        == 0
    )
    assert json.loads((files / "hf" / "config.json").read_text())["architectures"] == ["GateForMaskedLM"]
    assert "# A packed Gate" in (files / "hf" / "README.md").read_text()
    again = build_model(MASKED_LM, its_config, 0)
    found = starting_weights.load(files / "hf", named_weights(again), its_config)
    assert (found.missing, found.unused) == ([], [])
    assert run_export(init_checkpoint=files / "run", output_dir=files / "keras", format="keras") == 0
    opened = keras.saving.load_model(files / "keras" / "model.keras")
    for name, values in trained.items():
        for model in (again, opened):
            np.testing.assert_array_equal(named_weights(model)[name].numpy(), values, err_msg=name)
    assert pretrain(files, init_checkpoint=files / "hf", output_dir=files / "second") == 0
    encoder = inference.load_encoder(files / "hf", files / "vocab.txt", max_seq_length=MAX_SEQ_LENGTH)
    together = encoder.encode(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(encoder.encode([text])[0], vector, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"objective": "mlm_nsp"},
            "`bert_config_file` must be a BERT for objective=mlm_nsp. Received: a Gate.",
        ),
        ({"attention": "flash"}, "`attention` must not be flash for a Gate, which does not attend."),
        ({"ablation": "no_attention_mask"}, "`ablation` must be empty for a Gate. Received: no_att"),
        ({"hidden_dropout_prob": 0.1}, "`hidden_dropout_prob` must be -1 for a Gate, which has no dropout."),
        pytest.param(
            {"layout": "optimus2d", "mesh": "1,1"},
            "`layout` must be left out for a Gate. Received: optimus2d.",
            marks=pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
        ),
    ],
)
def test_what_it_cannot_is_refused_in_one_line(files, capsys, flags, message):
    assert pretrain(files, **flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_it_is_not_fine_tuned(files, capsys):
    checkpoint.save_weights(
        files / "ours", named_weights(build_model(MASKED_LM, GateConfig(), 0)), GateConfig()
    )
    flags = {
        "init_checkpoint": files / "ours",
        "output_dir": files / "squad",
        "vocab_file": files / "vocab.txt",
    }
    assert run(run_squad.main, SquadConfig, **flags) == 2
    assert (
        "`init_checkpoint` must be of a BERT or ModernBERT. Received: model_type gate."
        in capsys.readouterr().err
    )
    with pytest.raises(InputError, match="`bert_config_file` must be of a BERT"):
        build_model("pretraining", GateConfig(), 0)
