"""Any JSON in the place of any value of a `config.json`: a config, or one line that names the file.

The fault that this file alone catches: a value of another kind, or too large, that ends in a traceback, takes
all memory, or is passed over although it changes what the model computes.
"""

import dataclasses
import math

import pytest

from bert_packed.architectures import registry as config
from bert_packed.core.settings import InputError

SIMPLE = [None, True, False, 0, -1, 1, 3, 0.5, 1e300, math.nan, math.inf, 2**40, 10**400, "x", [], {}, [[{}]]]
ODD = [
    *SIMPLE,
    *([value, value] for value in SIMPLE),
    *({"full_attention": value} for value in SIMPLE),
    *({"full_attention": {"rope_theta": value}} for value in SIMPLE),
    {"__float__": "x"},
]


class Recorded(dict):
    """A JSON object that knows what was looked for in it."""

    def __init__(self, content):
        super().__init__(content)
        self.seen = set()

    def get(self, name, default=None):
        self.seen.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.seen.add(name)
        return super().__contains__(name)


@pytest.fixture(params=config.FAMILIES)
def family(request):
    return config.FAMILIES[request.param]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Function from the content of a file to the config, or to the line of its refusal."""
    path = tmp_path / "config.json"
    path.touch()

    def load(content):
        with monkeypatch.context() as patch:
            patch.setattr(config, "read_json", lambda _: content)
            try:
                return config.load_model_config(path)
            except InputError as error:
                assert str(path) in str(error) and "\n" not in str(error)
                return str(error)

    return load


def smallest(family):
    size = next(iter(family.sizes.values()))
    return {"model_type": config.model_type(size), **config.config_json(size)}


def test_any_json_is_a_config_or_one_line(family, read):
    plain = Recorded(smallest(family))
    assert type(read(plain)) is family.config_class
    names = plain.seen | config.field_names(family.config_class) | {*dict(family.config_class.fixed)}
    assert len(names) > len(dataclasses.fields(family.config_class)) + 1
    for name in names:
        found = [read({**plain, name: value}) for value in ODD]
        assert sum(isinstance(one, str) for one in found) >= len(ODD) // 2, name


def test_sizes_and_numbers_have_a_largest_value(family, read):
    """A width of 2**40 is a slip; 1e300 would be infinite in float32."""
    for field in dataclasses.fields(family.config_class):
        if field.type in (int, float):
            found = read({**smallest(family), field.name: 2**40 if field.type is int else 1e300})
            assert f"`{field.name}` must be at most {field.metadata['maximum']}" in found, field.name


def test_what_a_model_cannot_compute_is_refused(family, read):
    """Names that are no field of ours, but change what the file's weights compute."""
    for name, value in family.config_class.fixed:
        plain = {**smallest(family), name: value}
        assert type(read(plain)) is family.config_class
        # What is off may be null, which others read as false
        others = [one for one in ODD if one is not None] if not value else [*ODD, None]
        assert value or type(read({**plain, name: None})) is family.config_class
        for other in others:
            if other != value:
                assert f"config.json: {name} must be {value}. Received: " in read({**plain, name: other})


FOREIGN = {
    "bert": {"quantization_config", "position_embedding_type", "is_decoder"},
    "modernbert": {"quantization_config", "tie_word_embeddings", "rope_scaling"},
    "mamba": {"quantization_config", "hidden_act", "residual_in_fp32", "tie_word_embeddings"},
    "mamba2": {"quantization_config", "hidden_act", "residual_in_fp32", "rms_norm", "norm_before_gate"}
    | {"attn_layer_idx"},
}


@pytest.mark.parametrize("name", config.FAMILIES)
def test_names_that_are_no_field_are_known(name):
    assert {one for one, _ in config.FAMILIES[name].config_class.fixed} == FOREIGN[name]
