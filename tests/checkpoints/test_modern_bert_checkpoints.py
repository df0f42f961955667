"""A ModernBERT's checkpoints: in from transformers and out to it, configs of both its versions, the audit."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from byte_tokenizers import roberta
from exports import run_export
from modern_bert_models import BIASES, CONFIG, make_reference
from packs import random_packs, write_packs
from reference import import_reference
from reference_models import load_ours
from safetensors.numpy import load_file

from bert_packed import cli
from bert_packed.architectures.modern_bert.checkpoint_names import tensor_names
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM, MODEL_SIZES, ablate, config_json, load_model_config
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.text import byte_bpe
from bert_packed.text.tokenization import SPECIAL_TOKENS
from bert_packed.training.engines.engine import named_weights

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
LENGTH = 24
# As on the hub, without what only tokenizers read
PUBLISHED = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "position_embedding_type": "absolute",
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder that transformers wrote, and its model."""
    folder = tmp_path_factory.mktemp("theirs")
    reference = make_reference()
    reference.save_pretrained(folder)
    return folder, reference


def test_an_export_opens_in_transformers_and_gives_what_it_gave(theirs, tmp_path):
    torch, transformers = import_reference()
    folder, reference = theirs
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "pack", "##ed"]) + "\n")
    flags = {"init_checkpoint": folder, "output_dir": tmp_path / "hf", "vocab_file": tmp_path / "vocab.txt"}
    assert run_export(**flags) == 0
    again, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    bare = transformers.AutoModel.from_pretrained(tmp_path / "hf")
    tokens = torch.tensor([np.random.default_rng(0).integers(1, 31, 20).tolist()])
    with torch.no_grad():
        want = reference(input_ids=tokens, output_hidden_states=True)
        assert torch.equal(again.eval()(input_ids=tokens).logits, want.logits)
        assert torch.equal(bare.eval()(input_ids=tokens).last_hidden_state, want.hidden_states[-1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("packed")["input_ids"] == [2, 5, 6, 3]
    assert "# A packed ModernBERT" in (tmp_path / "hf" / "README.md").read_text()
    # All tensors, bit for bit
    written, read = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "hf"))
    assert read.keys() == written.keys() - {"decoder.weight"}
    for name, values in read.items():
        np.testing.assert_array_equal(values, written[name], err_msg=name)


def test_a_tokenizer_of_bytes_goes_along_with_its_special_tokens(tmp_path):
    _, transformers = import_reference()
    trained = roberta()
    byte_bpe.save(trained, str(tmp_path / "bpe.json"))
    config = dataclasses.replace(CONFIG, vocab_size=trained.get_vocab_size())
    checkpoint.save_weights(tmp_path / "ours", named_weights(build_model(MASKED_LM, config, 1)), config)
    flags = {"init_checkpoint": tmp_path / "ours", "vocab_file": tmp_path / "bpe.json"}
    assert run_export(**flags, output_dir=tmp_path / "hf") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    ids = {"bos": 0, "cls": 0, "pad": 1, "eos": 2, "sep": 2, "mask": 4}
    for name, index in ids.items():
        assert getattr(tokenizer, f"{name}_token_id") == written[f"{name}_token_id"] == index
    assert 4 in tokenizer("packs of <mask>")["input_ids"]
    assert tokenizer.decode(tokenizer("packs, naïvely")["input_ids"]) == "<s>packs, naïvely</s>"
    assert tokenizer.model_max_length == CONFIG.max_position_embeddings


def test_transformers_reads_our_config_as_it_writes_it(theirs, tmp_path):
    """Nothing is left to its defaults, which change from version to version."""
    _, transformers = import_reference()
    assert run_export(init_checkpoint=theirs[0], output_dir=tmp_path / "hf") == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    read = transformers.ModernBertConfig.from_pretrained(tmp_path / "hf")
    assert {name: getattr(read, name, value) for name, value in written.items()} == written
    assert read.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    rope = {kind: values["rope_theta"] for kind, values in read.rope_parameters.items()}
    assert rope == {"full_attention": 5000.0, "sliding_attention": 20.0}
    assert starting_weights.read_config(tmp_path / "hf") == starting_weights.read_config(theirs[0]) == CONFIG


def test_settings_that_transformers_trained_otherwise_are_named(theirs):
    weights = named_weights(build_model(MASKED_LM, CONFIG, seed=1))
    assert starting_weights.load(theirs[0], weights, CONFIG).changed == []
    other = dataclasses.replace(CONFIG, global_rope_theta=7.0)
    changed = starting_weights.load(theirs[0], weights, other).changed
    assert changed == ["global_rope_theta 7.0 (trained with 5000.0)"]


def test_an_encoder_without_a_head_starts_a_model(tmp_path):
    reference = make_reference(kind="ModernBertModel")
    reference.save_pretrained(tmp_path)
    weights = named_weights(build_model(MASKED_LM, CONFIG, seed=1))
    found = starting_weights.load(tmp_path, weights, CONFIG)
    heads = ["predictions/LayerNorm/gamma", "predictions/output_bias", "predictions/transform/kernel"]
    assert (sorted(found.missing), found.unused) == (heads, [])
    want = reference.layers[2].attn.Wqkv.weight.detach().numpy().T
    np.testing.assert_array_equal(weights["modern_bert/layer_2/attention/qkv/kernel"].numpy(), want)


@pytest.mark.parametrize("biases", BIASES)
def test_the_table_names_every_tensor_of_each_model_once(biases):
    config = dataclasses.replace(CONFIG, **BIASES[biases])
    rows = [row.ours for row in tensor_names(config)]
    assert sorted(rows) == sorted(named_weights(build_model(MASKED_LM, config, seed=1)))


def test_a_keras_file_opens(theirs, tmp_path):
    folder, _ = theirs
    assert run_export(init_checkpoint=folder, output_dir=tmp_path / "keras", format="keras") == 0
    again = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    model = load_ours(tmp_path, theirs[1], MASKED_LM)
    for one, other in zip(again.trainable_weights, model.trainable_weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_angles_and_lengths_may_grow_from_checkpoint_to_checkpoint(tmp_path):
    """A context of 1,024 tokens becomes one of 8,192 by larger angles."""
    checkpoint.save_weights(tmp_path, named_weights(build_model(MASKED_LM, CONFIG, seed=1)), CONFIG)
    longer = dataclasses.replace(CONFIG, global_rope_theta=160000.0, max_position_embeddings=512)
    weights = named_weights(build_model(MASKED_LM, longer, seed=2))
    found = starting_weights.load(tmp_path, weights, longer)
    assert found.num_used == len(weights)
    assert found.lines()[1:] == [
        f"  settings that are not the checkpoint's: max_position_embeddings 512 (trained with "
        f"{CONFIG.max_position_embeddings}), global_rope_theta 160000.0 (trained with 5000.0)"
    ]
    dropped = dataclasses.replace(CONFIG, attention_dropout=0.3, initializer_range=0.1)
    assert starting_weights.load(tmp_path, weights, dropped).changed == []
    other = dataclasses.replace(CONFIG, local_attention=12)
    with pytest.raises(InputError, match=r"local_attention must be 12\. Received: 10"):
        starting_weights.load(tmp_path, weights, other)


# ---- configs


def read(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    return load_model_config(tmp_path / "config.json")


def test_both_forms_of_the_published_config_are_the_base_model(tmp_path):
    base = MODEL_SIZES["modernbert-base"]
    assert read(tmp_path, PUBLISHED) == base
    newer = {
        name: value for name, value in PUBLISHED.items() if not name.endswith(("theta", "every_n_layers"))
    }
    newer["layer_types"] = base.layer_types
    thetas = {"full_attention": 80000, "sliding_attention": 30.5}
    newer["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
    }
    want = dataclasses.replace(base, global_rope_theta=80000.0, local_rope_theta=30.5)
    assert read(tmp_path, newer) == want
    every_second = ["full_attention", "sliding_attention"] * 11
    assert read(tmp_path, {**newer, "layer_types": every_second}).global_attn_every_n_layers == 2
    assert read(tmp_path, config_json(want)) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings must be True. Received: False"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must be None. Received: {'type': 'linear'}"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4}}},
            "a rope_type of default and a rope_theta, and nothing else. Received: {'full_attention': {",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters must give full_attention and sliding_attention a rope_type of default and",
        ),
        ({"layer_types": ["sliding_attention"] * 22}, "layer_types must be full_attention in the first and"),
        ({"hidden_activation": "silu"}, "`hidden_activation` must be one of gelu, gelu_new, relu. Received:"),
        ({"num_attention_heads": 5}, "`num_attention_heads` must divide `hidden_size`. Received:"),
        ({"num_attention_heads": 256}, "`num_attention_heads` must divide `hidden_size` into even widths."),
        ({"local_attention": 0}, "`local_attention` must be at least 1. Received: 0"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(InputError) as error:
        read(tmp_path, {**PUBLISHED, **change})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sizes_are_those_of_the_paper():
    shapes = {
        name: (size.num_hidden_layers, size.hidden_size, size.num_attention_heads, size.intermediate_size)
        for name, size in MODEL_SIZES.items()
        if name.startswith("modernbert")
    }
    assert shapes == {
        "modernbert-tiny": (3, 128, 2, 192),
        "modernbert-mini": (6, 256, 4, 384),
        "modernbert-base": (22, 768, 12, 1152),
        "modernbert-large": (28, 1024, 16, 2624),
    }


# ---- the audit


# JAX compiles each for ten seconds
dear = [pytest.mark.slow] if keras.backend.backend() == "jax" else []
ablated = [pytest.param(name, marks=dear) for name in ("no_attention_mask", "no_position_reset")]


@pytest.mark.parametrize("ablation", ["", *ablated])
def test_the_audit(tmp_path, capsys, ablation):
    """Positions that go on leave no other trace in short packs: attention reads their differences."""
    config = ablate(CONFIG, ablation)
    weights = named_weights(
        build_model(MASKED_LM, dataclasses.replace(config, initializer_range=0.3), seed=1)
    )
    checkpoint.save_weights(tmp_path / "ours", weights, config)
    packs = random_packs(np.random.default_rng(0), 6, LENGTH)
    write_packs(tmp_path / "packs.tfrecord", packs, LENGTH)
    flags = {"input_file": tmp_path / "packs.tfrecord", "init_checkpoint": tmp_path / "ours"}
    argv = ["audit", *(f"--{name}={value}" for name, value in flags.items())]
    status = run(cli.audit, AuditConfig, argv)
    failed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line]
    assert (status == 0) == (ablation == "") == (not failed)
    if ablation == "no_attention_mask":
        assert {"neighbors: change of hidden_states", "unpacked: hidden_states"} <= {*failed}
    if ablation == "no_position_reset":
        assert failed == ["settings: ablations of the checkpoint"]
