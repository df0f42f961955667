"""Settings: each rule is checked, and the message names field, rule and value."""

import dataclasses
import math

import pytest

from bert_packed.core.settings import (
    InputError,
    check_depth_fits,
    check_divides,
    check_settings,
    parse_depth,
    result_settings,
    setting,
    variant,
)
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
        ("depth", -1, "a whole number of at least 1, or the word max"),
        ("depth", "some", "a whole number of at least 1, or the word max"),
    ],
)
def test_bad_values_are_named(name, value, rule):
    with pytest.raises(InputError) as caught:
        Example(**{name: value})
    assert str(caught.value) == f"`{name}` must be {rule}. Received: {value!r}."


@dataclasses.dataclass(frozen=True)
class Company:
    input_file: str = setting("", "where from", required=True)
    dry_run: bool = setting(False, "try")
    goal: str = setting("mlm", "what for", choices=("mlm", "nsp", "lm"))
    histogram: str = setting("", "with dry_run", only_with="dry_run")
    rate: float = setting(0.5, "with some goals", only_with="goal=mlm,nsp")
    rows: int = setting(
        0,
        "without either",
        only_with={
            "dry_run=false": "be left out with --dry_run",
            "goal=lm": "be 0 with --goal={goal}, which has none",
        },
    )

    def __post_init__(self):
        check_settings(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_file": ""}, "`input_file` must be given. Received: nothing."),
        ({"histogram": "h"}, "`histogram` must be given with --dry_run only. Received: 'h'."),
        ({"goal": "lm", "rate": 0.0}, "`rate` must be given with --goal=mlm or nsp only. Received: 0.0."),
        ({"dry_run": True, "goal": "lm", "rows": 3}, "`rows` must be left out with --dry_run. Received: 3."),
        ({"rows": 3}, "`rows` must be 0 with --goal=mlm, which has none. Received: 3."),
        ({"dry_run": "yes", "rows": 3}, "`dry_run` must be true or false. Received: 'yes'."),
    ],
)
def test_settings_that_others_need_or_rule_out(values, message):
    with pytest.raises(InputError) as caught:
        Company(**{"input_file": "a", **values})
    assert str(caught.value) == message
    Company("a", dry_run=True, histogram="h", goal="nsp", rate=0.0)
    Company("a", goal="lm", rows=3)


def test_a_default_counts_where_it_was_given():
    config = Company("a", goal="lm")
    check_settings(config, {"rows", "goal"})
    with pytest.raises(
        InputError, match=r"`rate` must be given with --goal=mlm or nsp only\. Received: 0\.5"
    ):
        check_settings(config, {"rate"})


def test_a_variant_of_a_setting_keeps_its_rules():
    @dataclasses.dataclass(frozen=True)
    class More(Example):
        num_shards: int = variant(Example, "num_shards", 2, help="fewer files")

    assert More().num_shards == 2
    assert next(field.metadata["help"] for field in dataclasses.fields(More)) == "fewer files"
    with pytest.raises(InputError, match="`num_shards` must be at most 99"):
        More(100)


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


def test_a_pack_has_room_for_as_many_sequences_as_tokens():
    check_depth_fits(8, 8)
    check_depth_fits("max", 8)
    with pytest.raises(InputError, match=r"`max_sequences_per_pack`.* at most size.*per_pack=9, size=8"):
        check_depth_fits(9, 8, "size")


@dataclasses.dataclass(frozen=True)
class Batches:
    micro_batch_size: int = setting(0, "part")
    train_batch_size: int = setting(8, "whole")
    name: str = setting("", "text")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "train_batch_size")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"micro_batch_size": 3},
            "`micro_batch_size` must divide `train_batch_size`. Received: micro_batch_size=3, "
            "train_batch_size=8.",
        ),
        ({"micro_batch_size": 16}, "Received: micro_batch_size=16, train_batch_size=8."),
        ({"name": 3}, "`name` must be text. Received: 3."),
        (
            {"name": "\udcff"},
            "`name` must be UTF-8, as file names must be for TensorFlow. Received: '\\udcff'.",
        ),
    ],
)
def test_parts_divide_wholes_and_text_is_utf8(values, message):
    for good in (0, 1, 4, 8):
        Batches(good)
    with pytest.raises(InputError) as caught:
        Batches(**values)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("config", [CreateConfig, PackConfig])
def test_a_seed_that_no_generator_takes_is_a_mistake(config, tmp_path):
    assert config(output_dir=str(tmp_path), random_seed=2**32 - 1).random_seed == 2**32 - 1
    for seed in (2**32, 2**64):
        with pytest.raises(InputError, match=rf"`random_seed` must be .*Received: {seed}"):
            config(output_dir=str(tmp_path), random_seed=seed)
