"""Masked LM without next sentences: packing is invisible to it, and its weights go out and come back."""

import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, to_floats

from bert_packed.objectives.pretraining import masked_lm_objective, pretraining_objective
from bert_packed.training import engines

pytestmark = pytest.mark.both_backends


def make_engine(objective=None):
    objective = objective or masked_lm_objective("per_sequence")
    return engines.make_engine(objective.build_model(CONFIG, 1), objective)


def gradients(engine, batch):
    found, sums = engine.gradients(batch)
    names = [variable.path.partition("/")[2] for variable in engine.model.trainable_variables]
    return dict(zip(names, map(np.asarray, found), strict=True)), to_floats(sums)


def assert_equal(got, want):
    for name, values in want.items():
        if name.endswith("key/bias"):  # which moves no softmax
            assert np.abs(got[name]).max() <= 1e-6
            continue
        scale = np.abs(values).max()
        assert scale > 1e-4, f"{name} has no gradient: the comparison would be empty"
        assert np.abs(got[name] - values).max() <= 1e-5 * scale, name


def test_it_learns_what_both_heads_together_learn_of_masked_tokens():
    """The gradients of the ablation without next-sentence loss, of the weights that both models have."""
    batch, _ = packed_and_unpacked()
    engines_of_both = make_engine(), make_engine(pretraining_objective("per_sequence", False))
    for name, weight in engines_of_both[0].weights().items():
        weight.assign(engines_of_both[1].weights()[name])
    (alone, sums), (both, both_sums) = (gradients(engine, batch) for engine in engines_of_both)
    assert both.keys() - alone.keys() == {
        f"next_sentence/{part}/{kind}" for part in ("pooler", "classifier") for kind in ("kernel", "bias")
    }
    assert_equal(alone, {name: both[name] for name in alone})
    assert sums.keys() < both_sums.keys()
    assert sums == pytest.approx({name: both_sums[name] for name in sums}, rel=1e-5)
