"""A tiny BERT as google-research/bert stores it."""

import dataclasses
import json

import pytest
from checkpoint_cases import randomize
from tiny import SHALLOW as ONE_LAYER

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.training.engines.engine import named_weights

BLOCK = "bert/encoder/layer_0"
# Google's names of our layers, written out by hand; tables and their norm have one name
LAYERS = {
    **{
        f"bert/layer_0/attention/{part}": f"{BLOCK}/attention/self/{part}"
        for part in ("query", "key", "value")
    },
    "bert/layer_0/attention/output": f"{BLOCK}/attention/output/dense",
    "bert/layer_0/attention/LayerNorm": f"{BLOCK}/attention/output/LayerNorm",
    "bert/layer_0/feed_forward/intermediate": f"{BLOCK}/intermediate/dense",
    "bert/layer_0/feed_forward/output": f"{BLOCK}/output/dense",
    "bert/layer_0/feed_forward/LayerNorm": f"{BLOCK}/output/LayerNorm",
    "predictions/transform": "cls/predictions/transform/dense",
    "predictions/LayerNorm": "cls/predictions/transform/LayerNorm",
    "predictions": "cls/predictions",
    "next_sentence/pooler": "bert/pooler/dense",
    "next_sentence/classifier": "cls/seq_relationship",
}


def make_model():
    """A model of one layer with random values in every tensor."""
    return randomize(build_model(PRETRAINING, ONE_LAYER, seed=0))


def google_tensors():
    """The tensors of `make_model` by Google's names."""
    found = {}
    for name, variable in named_weights(make_model()).items():
        layer, _, part = name.rpartition("/")
        values = variable.numpy()
        if layer == "next_sentence/classifier":  # outputs × inputs there
            values, part = values.T, {"kernel": "output_weights", "bias": "output_bias"}[part]
        found[f"{LAYERS.get(layer, layer)}/{part}"] = values
    return found


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
