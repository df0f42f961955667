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
    micro_batch_size: int = setting(0, "part")
    train_batch_size: int = setting(8, "whole")
    name: str = setting("", "text")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "train_batch_size")


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


DEPTH = "a whole number of at least 1, or the word max"
SIZES = "divide `train_batch_size`. Received: micro_batch_size={}, train_batch_size=8"
MISTAKES = [
    (Example, {"num_shards": 0}, "be at least 1. Received: 0"),
    (Example, {"num_shards": 100}, "be at most 99. Received: 100"),
    (Example, {"num_shards": 1.5}, "be a whole number. Received: 1.5"),
    (Example, {"num_shards": True}, "be a whole number. Received: True"),
    (Example, {"eval_fraction": -0.1}, "be at least 0. Received: -0.1"),
    (Example, {"eval_fraction": math.nan}, "be a finite number. Received: nan"),
    (Example, {"eval_fraction": "half"}, "be a finite number. Received: 'half'"),
    (Example, {"algorithm": "zpfhp"}, "be one of spfhp, lpfhp. Received: 'zpfhp'"),
    (Example, {"overwrite": "yes"}, "be true or false. Received: 'yes'"),
    *((Example, {"depth": depth}, f"be {DEPTH}. Received: {depth!r}") for depth in (0, -1, "some")),
    *((Example, {"micro_batch_size": size}, SIZES.format(size)) for size in (3, 16)),
    (Example, {"name": 3}, "be text. Received: 3"),
    (Example, {"name": "\udcff"}, r"be UTF-8, as file names must be for TensorFlow. Received: '\udcff'"),
    (Company, {"input_file": ""}, "be given. Received: nothing"),
    (Company, {"histogram": "h"}, "be given with --dry_run only. Received: 'h'"),
    (Company, {"rate": 0.0, "goal": "lm"}, "be given with --goal=mlm or nsp only. Received: 0.0"),
    (Company, {"rows": 3, "dry_run": True, "goal": "lm"}, "be left out with --dry_run. Received: 3"),
    (Company, {"rows": 3}, "be 0 with --goal=mlm, which has none. Received: 3"),
    (Company, {"dry_run": "yes", "rows": 3}, "be true or false. Received: 'yes'"),
]


@pytest.mark.parametrize(("config", "values", "message"), MISTAKES)
def test_the_setting_its_rule_and_its_value_are_named(config, values, message):
    with pytest.raises(InputError) as caught:
        config(**({"input_file": "a"} if config is Company else {}) | values)
    assert str(caught.value) == f"`{next(iter(values))}` must {message}."


def test_settings_within_their_rules_are_taken():
    Company("a", dry_run=True, histogram="h", goal="nsp", rate=0.0)
    Company("a", goal="lm", rows=3)
    for size in (0, 1, 4, 8):
        Example(micro_batch_size=size)


def test_a_default_counts_where_it_was_given():
    config = Company("a", goal="lm")
    check_settings(config, {"rows", "goal"})
    with pytest.raises(
        InputError, match=r"`rate` must be given with --goal=mlm or nsp only\. Received: 0\.5"
    ):
        check_settings(config, {"rate"})
