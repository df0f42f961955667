"""Sixteen devices on this processor, and steps of a tiny packed BERT on meshes of them; JAX alone."""

import contextlib
import dataclasses

import keras
import pytest
from logical_devices import divide_processor
from packs import packed_and_unpacked
from tiny import CONFIG

from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.training import engines
from bert_packed.training.optimization import Lamb

NUM_DEVICES = 16
# 16 heads suit 16 devices; first weights are small, as BERT's: large ones round by more
WIDE = dataclasses.replace(
    CONFIG, hidden_size=48, num_attention_heads=16, intermediate_size=96, initializer_range=0.02
)
WITH_DROPOUT = dataclasses.replace(WIDE, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
MICRO_BATCH_SIZE = 8
CLIP = 0.5  # of lengths above 1
needs_jax = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]


def make_devices():
    """Let this process, which has computed nothing yet, see a number of devices."""
    divide_processor(NUM_DEVICES)


def make_replicas(layout, shape, transport="gather"):
    """`Replicas` over the first devices; None for layout "none"."""
    if layout == "none":
        return None
    from bert_packed.parallel.layouts import make_layout_replicas

    return make_layout_replicas(layout, shape, transport)


def make_engine(
    layout="none",
    shape=None,
    config=WITH_DROPOUT,
    transport="gather",
    objective=None,
    optimizer=Lamb,
    **build,
):
    replicas = make_replicas(layout, shape, transport)
    objective = objective or pretraining_objective("per_sequence")
    with replicas.scope() if replicas else contextlib.nullcontext():
        given = {"layout": replicas.layout} if replicas else {}
        model = objective.build_model(config, 1, **given, **build)
        optimizer = optimizer(0.01, weight_decay_rate=0.01, global_clipnorm=CLIP)
        return engines.make_engine(model, objective, optimizer, MICRO_BATCH_SIZE, replicas)


def batch_at(step):
    """Sixteen packs in two micro-batches; of no two rows of a mesh the packs hold as many predictions."""
    packed, _ = packed_and_unpacked(step)
    order = [0, 1, 2, 3, 3, 2, 4, 0, 1, 4, 2, 1, 0, 0, 3, 4]
    return {name: values[order] for name, values in packed.items()}
