"""`--objective` chooses an objective with its head, for the architectures that have one."""

import next_tokens
import pytest
from tiny import CONFIG

from bert_packed.config import OBJECTIVE_HEADS
from bert_packed.core.settings import InputError
from bert_packed.runs.objectives import choose_objective
from bert_packed.runs.pretraining_config import PretrainingConfig


@pytest.mark.parametrize("objective", OBJECTIVE_HEADS)
def test_an_objective_refuses_other_architectures(objective):
    config, other, theirs = CONFIG, next_tokens.CONFIG, r"a BERT .*\. Received: a Mamba"
    if objective == "causal_lm":
        config, other, theirs = next_tokens.CONFIG, CONFIG, r"a Mamba .*\. Received: a BERT"
    flags = PretrainingConfig(input_file="records", output_dir="run", objective=objective)
    model = choose_objective(objective, config, flags).build_model(config, 0)
    assert model.head == OBJECTIVE_HEADS[objective]
    with pytest.raises(InputError, match=f"`bert_config_file` must be {theirs}"):
        choose_objective(objective, other, flags)
