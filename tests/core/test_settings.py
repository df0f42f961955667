"""Settings: each rule is checked, and the message names field, rule and value."""

import dataclasses
import math

import pytest

from bert_packed.core.settings import InputError, check_settings, parse_depth, result_settings, setting
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig

# How a command is called; the result depends on none of it
CALLS = {"output_dir", "num_workers", "runner", "overwrite", "json"}


@dataclasses.dataclass(frozen=True)
class Example:
    num_shards: int = setting(8, "files", minimum=1, maximum=99)
    eval_fraction: float = setting(0.1, "share", minimum=0, maximum=1)
    algorithm: str = setting("lpfhp", "how", choices=("spfhp", "lpfhp"))
    overwrite: bool = setting(False, "replace")
    depth: int | str = setting("max", "sequences per pack", parse=parse_depth)

    def __post_init__(self):
        check_settings(self)


@pytest.mark.parametrize(
    "values",
    [{}, {"num_shards": 1}, {"num_shards": 99}, {"eval_fraction": 1}, {"depth": 3}, {"overwrite": True}],
)
def test_good_values_pass(values):
    example = Example(**values)
    assert all(getattr(example, name) == value for name, value in values.items())


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_shards", 0, "at least 1"),
        ("num_shards", 100, "at most 99"),
        ("num_shards", 1.5, "a whole number"),
        ("num_shards", True, "a whole number"),
        ("eval_fraction", -0.1, "at least 0"),
        ("eval_fraction", math.nan, "a finite number"),
        ("eval_fraction", "half", "a finite number"),
        ("algorithm", "zpfhp", "one of spfhp, lpfhp"),
        ("overwrite", "yes", "true or false"),
        ("depth", 0, "a whole number of at least 1, or the word max"),
        ("depth", "some", "a whole number of at least 1, or the word max"),
    ],
)
def test_bad_values_are_named(name, value, rule):
    with pytest.raises(InputError) as caught:
        Example(**{name: value})
    assert str(caught.value) == f"`{name}` must be {rule}. Received: {value!r}."


RATES = {"mask_replace_prob", "random_replace_prob"}


@pytest.mark.parametrize(
    ("config", "others", "unsaid"),
    [
        (PackConfig(), CALLS | {"dry_run", "histogram"}, {"split_sequences", "num_rows"}),
        (CreateConfig(output_dir="out"), CALLS, {"objective", "tokenizer", *RATES}),
        (
            CreateConfig(output_dir="out", vocab_file="vocab.txt"),
            CALLS | {"vocab_size"},
            {"objective", "tokenizer", *RATES},
        ),
    ],
)
def test_manifests_keep_the_settings_that_the_result_depends_on(config, others, unsaid):
    """All but what says that these are BERT's records, masked as usual: older manifests lack it."""
    names = {field.name for field in dataclasses.fields(config)}
    assert set(config.resolved()) == names - others - unsaid
    assert others - {"vocab_size"} == names - set(result_settings(config))


def test_parse_depth():
    assert parse_depth("max") == "max"
    assert parse_depth("12") == 12
    with pytest.raises(ValueError, match="or the word max"):
        parse_depth("-1")


@pytest.mark.parametrize("config", [CreateConfig, PackConfig])
def test_a_seed_that_no_generator_takes_is_a_mistake(config, tmp_path):
    assert config(output_dir=str(tmp_path), random_seed=2**32 - 1).random_seed == 2**32 - 1
    for seed in (2**32, 2**64):
        with pytest.raises(InputError, match=rf"`random_seed` must be .*Received: {seed}"):
            config(output_dir=str(tmp_path), random_seed=seed)
