"""Settings: each rule is checked, and the message names field, rule and value."""

import dataclasses
import math

import pytest

from bert_packed.core.settings import InputError, check_divides, check_settings, parse_depth, setting


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
