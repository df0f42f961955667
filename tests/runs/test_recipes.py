"""What the packing factor makes of an unpacked recipe, by the papers' two ways."""

import pytest

from bert_packed.config import MODEL_SIZES
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.runs.recipes import RECIPES, read_recipe, recipe_rows


def config(**flags):
    return TrainConfig(input_file="x", output_dir="y", **flags)


def test_the_two_ways_of_the_papers():
    """Section 4.3: 16,384 sequences of phase 2 and a factor of 2; Section 3.3: betas to its power."""
    found = read_recipe("base-phase2", 2.0, config(micro_batch_size=3, train_batch_size=6))
    assert found["unpacked"]["train_batch_size"] == 16384
    divided, raised = found["divide_batch"], found["raise_betas"]
    assert divided["train_batch_size"] == 8193  # of micro-batches of 3
    assert (divided["num_train_steps"], divided["num_warmup_steps"]) == (2137, 274)
    assert (raised["num_train_steps"], raised["num_warmup_steps"]) == (round(2137 / 2), 137)
    assert (divided["packing_correction"], raised["packing_correction"]) == ("none", "betas")
    rows = {row["setting"]: row for row in recipe_rows(found, config(train_batch_size=6, beta_1=0.8), 512)}
    assert (rows["max_seq_length"]["unpacked"], rows["max_seq_length"]["this run"]) == (384, 512)
    assert rows["beta_1"]["raise_betas"] == "0.9^2" and rows["beta_1"]["this run"] == 0.8
    assert rows["train_batch_size"]["this run"] == 6


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_takes_every_value_and_each_has_its_source(name):
    recipe = RECIPES[name]
    assert recipe.sources.keys() == recipe.values.keys() and all(recipe.sources.values())
    assert recipe.values["bert_config_file"] in MODEL_SIZES
    for packing_factor in (1.0, 1.17, 2.0):
        found = read_recipe(name, packing_factor, config())
        # as many sequences in all as the recipe sees, by either way
        sequences = recipe.values["train_batch_size"] * recipe.values["num_train_steps"]
        for way in ("divide_batch", "raise_betas"):
            run = config(**found[way])
            assert run.train_batch_size * run.num_train_steps * packing_factor == pytest.approx(
                sequences, rel=0.01
            )


# batch, steps, warm-up, peak and last rate as they were published
PUBLISHED = {
    "base-phase1": (65536, 7038, 2000, 0.006, 0),
    "base-phase2": (16384, 2137, 274, 0.002828427125, 0),
    "large-phase1": (65536, 7038, round(0.2843 * 7038), 0.006, 0),
    "large-phase2": (32768, 1563, round(0.128 * 1563), 0.004, 0),
    # one linear decay of 1e-4 over a million steps
    **dict.fromkeys(("devlin-base-phase1", "devlin-large-phase1"), (256, 900_000, 10_000, 1e-4, 1e-5)),
    **dict.fromkeys(("devlin-base-phase2", "devlin-large-phase2"), (256, 100_000, 0, 1e-5, 0)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_values_as_published(name):
    values = RECIPES[name].values
    flags = ("train_batch_size", "num_train_steps", "num_warmup_steps", "learning_rate")
    assert (*(values[flag] for flag in flags), values.get("end_learning_rate", 0)) == PUBLISHED[name]
    assert RECIPES[name].max_seq_length == (
        128 if "phase1" in name else 384 if name == "base-phase2" else 512
    )


def test_a_mamba_has_none():
    with pytest.raises(InputError, match=r"`recipe` must be empty for objective=causal_lm"):
        read_recipe("base-phase1", 2.0, config(objective="causal_lm"))


def test_an_unknown_factor_is_no_1():
    with pytest.raises(InputError, match=r"`recipe` must be empty where .* Received: base-phase1\."):
        read_recipe("base-phase1", None, config())
