"""Every setting of every architecture: in its model, in checkpoints that may start another, and in exports.

The fault that this file alone catches: a field of a config that a model ignores, that a checkpoint of another
value passes over, or that an export loses.
"""

import dataclasses
import functools
import types

import numpy as np
import pytest
from next_tokens import CONFIG as MAMBA
from next_tokens import MAMBA2
from next_tokens import packed_and_unpacked as causal_packs
from packs import packed_and_unpacked as masked_packs
from tiny import CONFIG as BERT

from bert_packed.architectures.modern_bert.config import ModernBertConfig
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    FAMILIES,
    family_of,
    load_model_config,
    model_type,
)
from bert_packed.checkpoints import starting_weights
from bert_packed.checkpoints.export_formats import write_hugging_face
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines.engine import named_weights

pytestmark = pytest.mark.usefixtures("uncompiled_file")
# Each setting can be seen at these values: wide weights, steps within limits, two local blocks
BASES = {
    "bert": dataclasses.replace(BERT, num_hidden_layers=1),
    "mamba": dataclasses.replace(MAMBA, num_hidden_layers=1, time_step_floor=0.05),
    "mamba2": dataclasses.replace(MAMBA2, num_hidden_layers=1, time_step_floor=0.05),
    "modernbert": ModernBertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        local_attention=8,
        global_rope_theta=5000.0,
        local_rope_theta=20.0,
        initializer_range=0.3,
    ),
}
# Twice the value, or another choice, would show no effect of these fields
CHANGES = {
    "global_attn_every_n_layers": 2,
    "layer_norm_eps": 0.5,
    "layer_norm_epsilon": 0.5,
    "norm_eps": 0.5,
    "initializer_cutoff_factor": 1.0,
    "time_step_limit_min": 0.3,
    "time_step_limit_max": 0.01,
    "time_step_max": 0.08,
    "time_step_floor": 0.07,
    "n_groups": 4,
}
# Only other code reads these: an objective, a check of lengths, the speed of a scan, seen in roundings
UNSEEN = {"ablation_no_next_sentence", "chunk_size"}
UNSEEN_OF = {"modernbert": {"max_position_embeddings"}}
FIELDS = [(name, field) for name, base in BASES.items() for field in dataclasses.fields(base)]


def changed(base, field):
    value = getattr(base, field.name)
    if field.name in CHANGES:
        other = CHANGES[field.name]
    elif field.type is bool:
        other = not value
    elif field.metadata["choices"]:
        other = next(one for one in field.metadata["choices"] if one != value)
    else:
        other = 2 * value or (0.5 if field.type is float else 1)
    return dataclasses.replace(base, **{field.name: other})


@functools.cache
def build(config, head):
    model = build_model(head, config, seed=1, num_outputs=3 if head == CLASSIFICATION else None)
    return model, {name: np.asarray(weight.value) for name, weight in named_weights(model).items()}


@functools.cache
def outputs(config, head):
    batch = (causal_packs if head == CAUSAL_LM else masked_packs)()[0]
    runs = [
        build(config, head)[0](batch, training=one)
        for one in (False, True)[: 1 + bool(config.dropout_fields)]
    ]
    return {
        f"{number} {name}": np.asarray(each) for number, run in enumerate(runs) for name, each in run.items()
    }


def are_equal(one, other, tolerance):
    return shapes(one) == shapes(other) and all(
        np.allclose(one[name], other[name], tolerance, tolerance) for name in one
    )


def shapes(arrays):
    return {name: values.shape for name, values in arrays.items()}


def first_head(config):
    return family_of(config).heads[0]


def test_the_grid_has_every_architecture():
    assert [model_type(base) for base in BASES.values()] == sorted(FAMILIES) == [*BASES]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda one: getattr(one, "name", one))
def test_a_setting_changes_the_model(name, field):
    base = BASES[name]
    other = changed(base, field)
    heads = [first_head(base), *({CLASSIFICATION} & {*family_of(base).heads})]
    is_unseen = field.name in UNSEEN | UNSEEN_OF.get(name, set())
    tolerance = 1e-5 if is_unseen else 0
    are_alike = all(
        are_equal(*(build(config, head)[1] for config in (base, other)), tolerance)
        and are_equal(*(outputs(config, head) for config in (base, other)), tolerance)
        for head in heads
    )
    assert are_alike == is_unseen


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    @functools.cache
    def write(config):
        model, folder = build(config, first_head(config))[0], tmp_path_factory.mktemp("export")
        write_hugging_face(folder, model, named_weights(model))
        return folder

    return write


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda one: getattr(one, "name", one))
def test_a_checkpoint_of_another_value_is_another_model(export, name, field):
    """It is not if the setting is of training alone, where no shape shows it."""
    base = BASES[name]
    theirs, ours = base, changed(base, field)
    if is_ablation := field.name.startswith("ablation_"):
        theirs, ours = ours, theirs
    wanted, held = (shapes(build(config, first_head(config))[1]) for config in (ours, theirs))
    weights = {
        name: types.SimpleNamespace(shape=shape, assign=lambda values: None) for name, shape in wanted.items()
    }
    if field.name in base.training_fields and wanted == held:
        assert starting_weights.load(export(theirs), weights, ours).num_used == len(weights)
    else:
        with pytest.raises(InputError, match="holds another model: "):
            starting_weights.load(export(theirs), weights, ours)
    if is_ablation:  # a sound model may start an experiment
        assert starting_weights.load(export(ours), weights, theirs).num_used == len(weights)


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda one: getattr(one, "name", one))
def test_an_export_says_every_setting(tmp_path, name, field):
    config = changed(BASES[name], field)
    model = types.SimpleNamespace(config=config, head=first_head(config), num_classes=None)
    write_json(str(tmp_path / "config.json"), family_of(config).load_names().hugging_face_config(model))
    assert load_model_config(tmp_path / "config.json") == config
