"""A tiny model as Hugging Face and google-research/bert store it."""

import dataclasses
import json

import numpy as np
import pytest
from packs import VOCAB_SIZE
from safetensors.numpy import save_file
from tiny import CONFIG

ONE_LAYER = dataclasses.replace(CONFIG, num_hidden_layers=1)
WIDTH, INNER = CONFIG.hidden_size, CONFIG.intermediate_size
# Our names map to (Hugging Face, Google, shape here, stored transposed there), written out by hand
BLOCK = {
    "attention/query": ("attention.self.query", "attention/self/query", (WIDTH, WIDTH)),
    "attention/key": ("attention.self.key", "attention/self/key", (WIDTH, WIDTH)),
    "attention/value": ("attention.self.value", "attention/self/value", (WIDTH, WIDTH)),
    "attention/output": ("attention.output.dense", "attention/output/dense", (WIDTH, WIDTH)),
    "feed_forward/intermediate": ("intermediate.dense", "intermediate/dense", (WIDTH, INNER)),
    "feed_forward/output": ("output.dense", "output/dense", (INNER, WIDTH)),
}
NORMS = {
    "bert/embeddings": ("bert.embeddings", "bert/embeddings"),
    "bert/layer_0/attention": (
        "bert.encoder.layer.0.attention.output",
        "bert/encoder/layer_0/attention/output",
    ),
    "bert/layer_0/feed_forward": ("bert.encoder.layer.0.output", "bert/encoder/layer_0/output"),
    "predictions": ("cls.predictions.transform", "cls/predictions/transform"),
}
TABLES = {"word_embeddings": VOCAB_SIZE, "token_type_embeddings": 2, "position_embeddings": 24}


def make_tensors():
    """The same random model three times: our names, Hugging Face's, Google's."""
    rng = np.random.default_rng(0)
    ours, theirs, google = {}, {}, {}

    def add(name, other, third, shape, other_transposed=False, third_transposed=False):
        values = rng.normal(size=shape).astype(np.float32)
        ours[name] = values
        theirs[other] = np.ascontiguousarray(values.T) if other_transposed else values
        google[third] = values.T if third_transposed else values

    def add_dense(name, other, third, shape):
        add(f"{name}/kernel", f"{other}.weight", f"{third}/kernel", shape, True)
        add(f"{name}/bias", f"{other}.bias", f"{third}/bias", shape[1:])

    for name, rows in TABLES.items():
        path = f"bert/embeddings/{name}"
        add(path, f"bert.embeddings.{name}.weight", path, (rows, WIDTH))
    for name, (other, third, shape) in BLOCK.items():
        add_dense(
            f"bert/layer_0/{name}", f"bert.encoder.layer.0.{other}", f"bert/encoder/layer_0/{third}", shape
        )
    for name, (other, third) in NORMS.items():
        for kind, its in (("gamma", "weight"), ("beta", "bias")):
            add(f"{name}/LayerNorm/{kind}", f"{other}.LayerNorm.{its}", f"{third}/LayerNorm/{kind}", (WIDTH,))
    add_dense("next_sentence/pooler", "bert.pooler.dense", "bert/pooler/dense", (WIDTH, WIDTH))
    transform = (
        "predictions/transform",
        "cls.predictions.transform.dense",
        "cls/predictions/transform/dense",
    )
    add_dense(*transform, (WIDTH, WIDTH))
    add("predictions/output_bias", "cls.predictions.bias", "cls/predictions/output_bias", (VOCAB_SIZE,))
    name, other, third = "next_sentence/classifier", "cls.seq_relationship", "cls/seq_relationship"
    add(f"{name}/kernel", f"{other}.weight", f"{third}/output_weights", (WIDTH, 2), True, True)
    add(f"{name}/bias", f"{other}.bias", f"{third}/output_bias", (2,))
    return ours, theirs, google


def write_hugging_face(folder, tensors, config=ONE_LAYER):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**dataclasses.asdict(config), "model_type": "bert"}))
    return folder


def write_google(folder, tensors, config=ONE_LAYER):
    """Write tensors as TensorFlow 1 did, by name."""
    tf = pytest.importorskip("tensorflow")
    folder.mkdir(exist_ok=True)
    prefix = folder / "bert_model.ckpt"
    names = list(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(tensors[name]) for name in names],
    )
    if config:
        (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return prefix
