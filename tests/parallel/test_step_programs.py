"""Program of a step on several devices: its share of the work, and the whole gradient sent once."""

import dataclasses
import re

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG

from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.parallel.replicas import make_replicas
from bert_packed.training import engines
from bert_packed.training.backend import make_virtual_devices
from bert_packed.training.optimization import Lamb
from bert_packed.training.step_report import describe_step, is_static

pytestmark = [pytest.mark.both_backends, pytest.mark.slow]
SMALL = dataclasses.replace(
    CONFIG, num_hidden_layers=1, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2
)


def test_a_step_on_two_devices():
    make_virtual_devices(2)  # this file's process has not computed anything yet
    objective = pretraining_objective("per_sequence")
    packed, _ = packed_and_unpacked()
    batch = {name: np.concatenate([values[:4], values[:4]]) for name, values in packed.items()}
    replicas = make_replicas("mirrored")
    with replicas.scope():
        model = objective.build_model(SMALL, 1)
        engine = engines.make_engine(model, objective, Lamb(0.01, global_clipnorm=0.5), 4, replicas)
    report = describe_step(engine.step_programs(batch))
    assert is_static(report) and report["devices"] == 2
    # of 8 packs a device has 4, in two rounds of 2
    length, width, wide = batch["token_ids"].shape[1], CONFIG.hidden_size, CONFIG.intermediate_size
    block = 4 * length * width**2 + 2 * length**2 * width + 2 * length * width * wide
    heads = batch["prediction_ids"].shape[1] * width * (width + CONFIG.vocab_size)
    heads += batch["slot_weights"].shape[1] * width * (width + 2)
    assert report["matmul_flops"] == 3 * 2 * 4 * (block + heads)
    if keras.backend.backend() == "tensorflow":
        assert report["collectives"] == []  # `tf.distribute` adds up, outside of the program
        (program,) = engine.step_programs(batch)
        summed = re.findall(r"= f32\[\d+,\d+,\d+,\d+\]\S* dot\(.*lhs_contracting_dims=\{(\d)\}", program.text)
        assert len(summed) == 6 and set(summed) == {"3"}  # attention's gradients in the form for CPUs
        return
    assert {(row["kind"], row["group_size"]) for row in report["collectives"]} == {("all-reduce", 2)}
    gradient = sum(variable.numpy().nbytes for variable in model.trainable_variables)
    assert gradient < report["collective_bytes"] <= gradient + 4 * 2 * len(objective.sum_names)
