"""What `--objective` chooses."""

import next_tokens
import pytest
from tiny import CONFIG

from bert_packed.runs.objectives import MODELS, OBJECTIVE_HEADS, choose_objective
from bert_packed.runs.pretraining_config import TrainConfig


@pytest.mark.parametrize("objective", MODELS)
def test_the_head_of_an_objective_is_its_models(objective):
    config = next_tokens.CONFIG if objective == "causal_lm" else CONFIG
    flags = TrainConfig(input_file="records", output_dir="run", objective=objective)
    model = choose_objective(objective, config, flags).build_model(config, 0)
    assert model.head == OBJECTIVE_HEADS[objective]
