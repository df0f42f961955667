"""Configs: the published sizes, bert_config.json, defaults, and every rule with its message.

The fault that this file alone catches: settings that contradict each other, and are not refused.
"""

import dataclasses
import json
import re

import pytest

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.architectures.registry import MODEL_SIZES, load_model_config
from bert_packed.core.settings import InputError
from bert_packed.runs.checkpoint_export import ExportConfig
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.config import FinetuneConfig
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.squad.config import SquadConfig
from bert_packed.text_to_model.config import TrainConfig

SHAPE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}


def test_published_sizes():
    def shapes(kind, *names):
        found = {name: size for name, size in MODEL_SIZES.items() if isinstance(size, kind)}
        return {size: tuple(getattr(shape, name) for name in names) for size, shape in found.items()}

    sizes = ("num_hidden_layers", "hidden_size")
    assert shapes(MambaConfig, *sizes, "inner_size", "step_rank", "state_size") == {
        "mamba-tiny": (2, 128, 256, 8, 16),
        "mamba-mini": (4, 256, 512, 16, 16),
        "mamba-110m": (16, 1024, 2048, 64, 16),  # these three as in "PackMamba", Section 4
        "mamba-1.4b": (48, 2048, 4096, 128, 16),
        "mamba-2.8b": (64, 2560, 5120, 160, 16),
    }
    assert shapes(ModelConfig, *sizes, "num_attention_heads", "intermediate_size") == {
        "bert-tiny": (2, 128, 2, 512),
        "bert-mini": (4, 256, 4, 1024),
        "bert-small": (4, 512, 8, 2048),
        "bert-medium": (8, 512, 8, 2048),
        "bert-base": (12, 768, 12, 3072),
        "bert-large": (24, 1024, 16, 4096),
    }


def test_vocabulary_of_a_named_size_is_the_datas():
    assert load_model_config("bert-mini").vocab_size == 30522
    assert load_model_config("bert-mini", 8192).vocab_size == 8192


def test_config_file(tmp_path):
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps({**SHAPE, "architectures": ["Bert"]}))
    config = load_model_config(str(path), vocab_size=7)
    assert (config.hidden_size, config.num_attention_heads, config.vocab_size) == (8, 2, 99)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must hold a JSON object. Received: list"),
        (json.dumps({**SHAPE, "hidden_act": "swish"}), "`hidden_act` must be one of gelu, gelu_new, relu."),
        (json.dumps({**SHAPE, "hidden_size": 9}), "`num_attention_heads` must divide `hidden_size`"),
        (json.dumps({**SHAPE, "hidden_size": "10"}), "`hidden_size` must be a whole number"),
        ('{"num_layers": 2, "hidden": 16}', "must have hidden_size, .* Received: no hidden_size"),
        ('{"position_embedding_type": "relative_key"}', "type must be absolute. Received: relative_key"),
    ],
)
def test_bad_config_files(tmp_path, content, message):
    path = tmp_path / "bert_config.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_model_config(str(path))
    assert str(path) in str(caught.value)


def test_unknown_size():
    with pytest.raises(InputError, match=r"one of bert-tiny, .* or an existing file. Received: 'bert-huge'"):
        load_model_config("bert-huge")


FILES = {"train_file": __file__, "predict_file": __file__}
GIVEN = {
    ModelConfig: {},
    PretrainingConfig: {"input_file": "x", "output_dir": "y"},
    FinetuneConfig: {"output_dir": "y"},
    ExportConfig: {"init_checkpoint": "x", "output_dir": "y"},
    TrainConfig: {"input_file": "x", "output_dir": "y"},
    SquadConfig: {"output_dir": "y", **FILES},
    GlueConfig: {"output_dir": "y", "task_name": "RTE", "data_dir": "x"},
    NerConfig: {"output_dir": "y", **FILES},
}
OPTIMUS, MEGATRON = {"layout": "optimus2d", "mesh": "2,2"}, {"layout": "megatron1d", "mesh": "1,2"}
GROWTH = {"initial_batch_size": 6, "batch_warmup_steps": 3, "micro_batch_size": 4}
MASKED = {"mask_replace_prob": 0.5, "random_replace_prob": 0.2, "do_whole_word_mask": True}
SHAPE_OF_MESH = "`mesh` must be empty, or two or three numbers of devices"
MISTAKES = {
    ModelConfig: [
        (
            {"num_attention_heads": 5},
            "must divide `hidden_size`. Received: num_attention_heads=5, hidden_size=768.",
        )
    ],
    PretrainingConfig: [
        ({"input_file": ""}, "`input_file` must be given"),
        ({"output_dir": ""}, "`output_dir` must be given"),
        ({"micro_batch_size": 5}, "`micro_batch_size` must divide `train_batch_size`"),
        ({"mlm_loss": "per_pack"}, "one of per_sequence, per_token. Received: 'per_pack'"),
        ({"packing_correction": "lr"}, "one of none, betas"),
        ({"train_batch_size": 0}, "`train_batch_size` must be at least 1"),
        ({"hidden_dropout_prob": -0.5}, "`hidden_dropout_prob` must be at least 0, or -1. Received: -0.5."),
        ({"attention_probs_dropout_prob": -2.0}, "`attention_probs_dropout_prob` must be at least 0, or -1"),
        ({"eval_steps": 5}, "`eval_steps` must be 0 without eval_input_file or do_eval. Received: 5."),
        ({"max_eval_steps": 2}, "or do_eval. Received: 2."),
        ({"learning_rate": -1.0}, "`learning_rate` must be at least 0"),
        ({"epsilon": 0.0}, "`epsilon` must be at least 1e-30. Received: 0.0"),
        ({"optimizer": "adamw"}, "`optimizer` must be one of lamb, adam, stable_adamw. Received: 'adamw'"),
        ({"objective": "mlm", "ablation": "separator_only"}, "`ablation` must leave next sentences alone"),
        ({"ablation": "no_mask"}, "must be empty or a comma-separated list of no_attention_mask"),
        ({"num_train_steps": 100, "num_warmup_steps": 40, "num_decay_steps": 61}, ", 60. Received: 61."),
        ({"decay_type": "cosine"}, "`decay_type` must be one of polynomial, 1-sqrt. Received: 'cosine'."),
        ({"decay_type": "1-sqrt", "decay_power": 0.5}, "`decay_power` must be 1 with decay_type=1-sqrt. Rec"),
        ({"initial_batch_size": 8}, "`initial_batch_size` and `batch_warmup_steps` must be given together. "),
        (GROWTH, "`initial_batch_size` must be a multiple of micro_batch_size"),
        ({**GROWTH, "initial_batch_size": 64}, "at most train_batch_size. Received: 64, micro_batch_size=4"),
        *(({name: v}, f"`{name}` must be left out with masking=static") for name, v in MASKED.items()),
        ({"masking": "dynamic", "objective": "causal_lm"}, "`masking` must be static for objective=causal_l"),
        ({"masking": "dynamic", "random_replace_prob": 0.5}, "at most 1 together. Received: mask_replace_pr"),
        ({"keep_optimizer_state": True}, "`keep_optimizer_state` must be false without init_checkpoint"),
        ({"export_every": -1}, "`export_every` must be at least 0. Received: -1."),
        ({"export_vocab_file": "v"}, "`export_vocab_file` must be left out without export_every"),
        ({"num_train_epochs": 2.0, "num_train_steps": 9}, "must be left out with num_train_epochs."),
        ({"num_train_epochs": -1.0}, "`num_train_epochs` must be at least 0. Received: -1.0"),
        ({"num_virtual_devices": 4}, "`num_virtual_devices` must be 0 without compile_only. Received: 4."),
        ({"mesh": "2,2"}, "`mesh` must be given with a layout, and only then. Received: layout=none,"),
        ({"layout": "optimus2d"}, "`mesh` must be given with a layout, and only then. Received: layout=opti"),
        ({**OPTIMUS, "mesh": "2x2"}, SHAPE_OF_MESH),
        ({**OPTIMUS, "mesh": "2,2,2,2"}, SHAPE_OF_MESH),
        ({**OPTIMUS, "distribution": "mirrored"}, "`distribution` must be none, or multi_worker"),
        ({**MEGATRON, "objective": "causal_lm"}, "`layout` must be none for objective=causal_lm. Received:"),
        ({"num_train_steps": 9, "profile_steps": "9,10"}, "`profile_steps` must be at most num_train_steps="),
        ({"profile_steps": "0,3"}, "`profile_steps` must be empty or two steps, FIRST,LAST"),
        ({"profile_steps": "20,10"}, "`profile_steps` must be empty or two steps, FIRST,LAST"),
    ],
    FinetuneConfig: [
        *(
            (
                {"optimizer": optimizer, "adam_bias_correction": False},
                "`adam_bias_correction` must be given with --optimizer=adam only. Received: False.",
            )
            for optimizer in ("lamb", "stable_adamw")
        ),
        ({"epsilon": 0.0}, "`epsilon` must be at least 1e-30. Received: 0.0"),
    ],
    SquadConfig: [
        ({"output_dir": ""}, "`output_dir` must be given"),
        ({"predict_file": ""}, "`predict_file` must be given unless --do_predict=false"),
        ({"do_train": False}, "`init_checkpoint` must be given unless --do_train"),
        ({"max_seq_length": 67}, "`max_seq_length` must be at least max_query_length + 4"),
        ({"max_sequences_per_pack": 385}, "`max_sequences_per_pack` must be at most max_seq"),
        ({"packing_algorithm": "nnlshp"}, "`max_sequences_per_pack` must be lower for pack"),
        ({"train_file": "none"}, "`train_file` must be an existing file. Received: none"),
        ({"predict_file": "."}, "`predict_file` must be an existing file. Received: ."),
        ({"vocab_file": "none"}, "`vocab_file` must be an existing file. Received: none"),
    ],
    GlueConfig: [
        ({"task_name": ""}, "`task_name` must be one of CoLA, SST-2, MRPC, STS-B"),
        ({"data_dir": ""}, "`data_dir` must be given"),
    ],
    NerConfig: [
        ({"train_file": ""}, "`train_file` must be given unless --do_train=false"),
        ({"predict_file": ""}, "`predict_file` must be given unless --do_predict=false"),
        ({"predict_file": "none"}, "`predict_file` must be an existing file. Received: none"),
        ({"labels_file": "none"}, "`labels_file` must be an existing file. Received: none"),
    ],
    ExportConfig: [
        ({"init_checkpoint": ""}, "`init_checkpoint` must be given"),
        ({"format": "onnx"}, "`format` must be one of hf, keras, saved_model"),
        ({"format": "keras", "vocab_file": "v"}, "`vocab_file` must be left out"),
        ({"format": "keras", "audit_file": "v"}, "`audit_file` must be left out unless --format=hf"),
        *(
            ({name: 3}, f"`{name}` must be left out unless --format=saved_model. Received: 3.")
            for name in ("max_sequences_per_pack", "max_predictions_per_pack")
        ),
    ],
    TrainConfig: [
        ({"vocab_file": "v", "vocab_size": 50}, "`vocab_size` must be left out with vocab_file"),
        ({"num_train_epochs": 2.0, "train_hours": 1.0}, "`num_train_epochs` must be left out with"),
        ({"masked_lm_prob": 1.0}, "`masked_lm_prob` must be between 0 and 1"),
        ({"num_train_epochs": 1e300}, "`num_train_epochs` must be at most 1000000"),
    ],
}


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [(config_class, *row) for config_class, rows in MISTAKES.items() for row in rows],
)
def test_a_mistake_is_told_by_its_rule(config_class, values, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        config_class(**{**GIVEN[config_class], **values})
    assert "\n" not in str(error.value)


def config(**settings):
    return PretrainingConfig(**GIVEN[PretrainingConfig], **settings)


def test_evaluation_may_be_limited_where_there_is_one():
    limited = config(eval_input_file="held-out", eval_steps=5, max_eval_steps=2)
    assert (limited.eval_steps, limited.max_eval_steps) == (5, 2)


def test_meshes_and_steps_to_profile():
    shapes = {"2,3": (1, 2, 3), "4,2,3": (4, 2, 3)}
    for mesh, shape in shapes.items():
        assert config(layout="optimus2d", mesh=mesh).mesh_shape == shape
    assert config().mesh_shape is None and not config().steps_to_profile
    assert [*config(profile_steps="10,12").steps_to_profile] == [10, 11, 12]


def test_steps_of_epochs_read_every_pack():
    for epochs, packs, steps in ((2.0, 15, 8), (1.0, 16, 4), (0.07, 100, 2), (0.55, 15, 3), (0.001, 15, 1)):
        found = config(num_train_epochs=epochs, train_batch_size=4).resolved(packs)
        assert (found.num_train_steps, found.num_train_epochs) == (steps, 0.0)
    growth = {"initial_batch_size": 2, "micro_batch_size": 2, "batch_warmup_steps": 4}
    growing = config(num_train_epochs=1.0, train_batch_size=8, **growth)
    assert growing.resolved(23).num_train_steps == 6
    assert config().resolved(15).num_train_steps == 100_000
    decaying = config(num_train_epochs=1.0, train_batch_size=4, num_warmup_steps=2, num_decay_steps=4)
    with pytest.raises(InputError, match="`num_decay_steps` must be at most num_train_steps less"):
        decaying.resolved(16)


def test_steps_beside_epochs_are_refused_at_their_default_too():
    with pytest.raises(InputError, match="`num_train_steps` must be left out with num_train_epochs"):
        config(num_train_epochs=1.0).check_given({"num_train_steps"})
    config().check_given({"num_train_steps", "num_train_epochs", "eval_steps"})


def test_micro_batch_defaults_to_the_whole_batch():
    assert config(train_batch_size=6).packs_at_once == 6
    assert config(train_batch_size=6, micro_batch_size=2).packs_at_once == 2


def test_help_shows_what_most_runs_need():
    fields = dataclasses.fields(PretrainingConfig)
    assert sum(not field.metadata["advanced"] for field in fields) <= 42 < len(fields)
