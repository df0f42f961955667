"""Rematerialised blocks give the same losses and gradients, dropout included."""

import dataclasses

import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, to_floats

from bert_packed.engines import make_engine
from bert_packed.losses import normalizers, pretraining_sums
from bert_packed.metrics import SUM_NAMES
from bert_packed.modeling import build_pretraining_model
from bert_packed.optimization import Lamb

WITH_DROPOUT = dataclasses.replace(CONFIG, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)


def make_remat_engine(remat, config, **kwargs):
    return make_engine(
        build_pretraining_model(config, 1, remat=remat),
        lambda outputs, batch: pretraining_sums(outputs, batch, "per_sequence"),
        SUM_NAMES,
        lambda batch: normalizers(batch, "per_sequence"),
        **kwargs,
    )


@pytest.mark.parametrize("config", [CONFIG, WITH_DROPOUT], ids=["sound", "dropout"])
@pytest.mark.parametrize("micro_batch_size", [5, pytest.param(1, marks=pytest.mark.both_backends)])
def test_gradients_are_the_same(config, micro_batch_size):
    packed, _ = packed_and_unpacked()
    plain, again = (make_remat_engine(r, config, micro_batch_size=micro_batch_size) for r in (False, True))
    for _ in range(2):  # the second call draws other seeds, the same in both
        want, want_sums = plain.gradients(packed)
        got, got_sums = again.gradients(packed)
        assert to_floats(got_sums) == pytest.approx(to_floats(want_sums), rel=1e-6)
        for variable, one, other in zip(plain.model.trainable_variables, got, want, strict=True):
            one, other = np.asarray(one), np.asarray(other)
            assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max() + 1e-6, variable.path
    seeds = [[v.numpy().tolist() for v in e.model.variables if "seed" in v.path] for e in (plain, again)]
    assert seeds[0] == seeds[1]


@pytest.mark.both_backends
def test_dropout_is_in_the_comparison():
    packed, _ = packed_and_unpacked()
    sums = [make_remat_engine(True, c).gradients(packed)[1]["mlm_loss"] for c in (CONFIG, WITH_DROPOUT)]
    assert abs(float(sums[0]) - float(sums[1])) > 1e-3


@pytest.mark.both_backends
def test_compiled_steps_are_the_same():
    packed, _ = packed_and_unpacked()
    engines = [make_remat_engine(r, WITH_DROPOUT, optimizer=Lamb(0.01)) for r in (False, True)]
    for engine in engines:
        engine.train_step(packed)
        assert engine.num_train_traces == 1
    for one, other in zip(*(engine.model.weights for engine in engines), strict=True):
        # Key biases: of a gradient that is 0 but for rounding, LAMB makes a step of any direction
        if not one.path.endswith("key/bias"):
            np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-4, err_msg=one.path)
