"""The audit's checks say how much leaks, from which sequence into which: planted leaks of known size."""

import dataclasses
import itertools
from types import SimpleNamespace

import next_tokens
import numpy as np
import pytest
from packs import batch_of, random_sequence

from bert_packed.architectures.mamba import model as mamba
from bert_packed.architectures.mamba2 import model as mamba2
from bert_packed.architectures.mamba2 import state_space_duality
from bert_packed.evaluation import contamination
from bert_packed.evaluation.model_audit import check_gradients
from bert_packed.objectives.features import RECORDED
from bert_packed.objectives.pretraining import pretraining_objective

OUTPUTS = {contamination.HIDDEN: "S", "mlm_logits": "P", "nsp_logits": "K"}
VOCAB_SIZE = 100  # more than any token: none comes round when it is changed by 1
LENGTHS = [[4, 5, 3], [6, 2, 4], [3]]


@pytest.fixture
def packs():
    rng = np.random.default_rng(0)
    batch = batch_of([[random_sequence(rng, n) for n in pack] for pack in LENGTHS], 14, 3, 8)
    assert batch["sequence_ids"].max(axis=1).tolist() == [3, 3, 1] and not batch["sequence_ids"][:, 13].any()
    return batch


def owners_of(batch, kind):
    if kind == "K":
        return batch["slot_weights"] * np.arange(1, batch["slot_weights"].shape[1] + 1)
    return batch[{"S": "sequence_ids", "P": "prediction_sequences"}[kind]]


def make_forward(leaks=(), frozen=()):
    """A model whose states are twice its tokens, and whose predictions are the states they stand on.

    Args:
        leaks: `(output, giver, taker, amount)`: rows of `taker` have the sum of `giver`'s tokens in them.
        frozen: Sequences whose states do not depend on their tokens.
    """

    def forward(batch):
        states = 2.0 * batch["token_ids"] * ~np.isin(batch["sequence_ids"], frozen)
        found = {
            contamination.HIDDEN: states,
            "mlm_logits": np.take_along_axis(states, batch["prediction_positions"], axis=1),
            "nsp_logits": np.take_along_axis(states, batch["cls_positions"], axis=1),
        }
        found = {name: values[..., None].astype(np.float32) for name, values in found.items()}
        for output, giver, taker, amount in leaks:
            given_B = np.sum(batch["token_ids"] * (batch["sequence_ids"] == giver), axis=1)
            takes = owners_of(batch, OUTPUTS[output]) == taker
            found[output] += (amount * given_B[:, None] * takes)[..., None]
        return found

    return forward


def changes(forward, packs):
    checks = contamination._neighbours_outputs(forward, OUTPUTS, VOCAB_SIZE, packs)
    return {check.name: check.largest for check in checks}


def compare_alone(forward, packs):
    unpacked, slots = contamination.unpack_batch(packs, 3, RECORDED)
    assert len(slots) == 7 and len(unpacked["token_ids"]) == 9
    checks = contamination._outputs_alone(forward, OUTPUTS, packs, unpacked, slots, 1e-5)
    assert {check.tolerance for check in checks} == {1e-5}
    return {check.name: check.largest for check in checks}


def given_alone(packs, output, giver):
    """The sum of the giver's tokens, relative to the largest output of the sequences alone."""
    given = max(packs["token_ids"][row][packs["sequence_ids"][row] == giver].sum() for row in (0, 1))
    used = owners_of(packs, OUTPUTS[output]) > 0
    return given / np.abs(make_forward()(packs)[output][used]).max()


# A check has names of figures, and the figure of a leak of all that a sequence gives. Tokens change by 1
READERS = {
    "changed": (changes, "neighbors: change of", lambda packs, output, giver: {1: 6, 2: 5, 3: 4}[giver]),
    "alone": (compare_alone, "unpacked:", given_alone),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_way_from_sequence_to_sequence_is_seen(packs, output, reader):
    read, name, size_of = READERS[reader]
    assert set(read(make_forward(), packs).values()) == {0.0}
    for giver, taker in itertools.permutations((1, 2, 3), 2):
        found = read(make_forward([(output, giver, taker, 0.25)]), packs)
        size = 0.25 * size_of(packs, output, giver)
        assert found.pop(f"{name} {output}") == pytest.approx(size), (giver, taker)
        assert set(found.values()) == {0.0}


def test_padding_must_not_move_and_unused_slots_may(packs):
    """Nothing reads an unused prediction; padding's states are read by every later block."""
    for giver in (1, 2, 3):
        found = changes(make_forward([(contamination.HIDDEN, giver, 0, 1.0)]), packs)
        assert found[f"neighbors: change of {contamination.HIDDEN}"] > 0
        for output in ("mlm_logits", "nsp_logits"):
            assert set(changes(make_forward([(output, giver, 0, 1.0)]), packs).values()) == {0.0}


def test_a_leak_between_equal_slots_of_two_packs_is_seen(packs):
    """Changed together, both would stay as they are beside each other."""
    sound = make_forward()

    def forward(batch):
        found = sound(batch)
        found["nsp_logits"][0, 0] += batch["token_ids"][1][batch["sequence_ids"][1] == 1].sum()
        return found

    found = changes(forward, packs)
    assert {name for name, size in found.items() if size} == {"neighbors: change of nsp_logits"}


def test_nan_does_not_pass(packs):
    found = changes(make_forward([("mlm_logits", 2, 1, np.nan)]), packs)
    assert np.isnan(found["neighbors: change of mlm_logits"])
    assert not contamination.Check("", np.nan, 0.0).passed and contamination.Check("", 0.0, 0.0).passed
    assert not contamination.Check("", 1.1e-5, 1e-5).passed


# A full pack uses the last place, prediction and slot
FULL = batch_of([[random_sequence(np.random.default_rng(1), n, n) for n in (3, 4)]], 7, 2, 7)
SIZES = {"S": 7, "P": 7, "K": 2}
CHECKS = {
    "changed": lambda forward: contamination._neighbours_outputs(forward, OUTPUTS, VOCAB_SIZE, FULL),
    "alone": lambda forward: contamination._outputs_alone(
        forward, OUTPUTS, FULL, *contamination.unpack_batch(FULL, 2), 1e-5
    ),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_leak_into_one_place_is_seen_wherever_it_is(output, check):
    assert all(owners_of(FULL, kind)[0].all() for kind in SIZES)

    def forward_of(place):
        def forward(batch):
            found, owners = make_forward()(batch), owners_of(batch, OUTPUTS[output])[:, place]
            others_BS = (batch["sequence_ids"] > 0) & (batch["sequence_ids"] != owners[:, None])
            found[output][:, place, 0] += np.sum(batch["token_ids"] * others_BS, axis=1) * (owners > 0)
            return found

        return forward

    for place in range(SIZES[OUTPUTS[output]]):
        found = CHECKS[check](forward_of(place))
        assert [one.name.split()[-1] for one in found if not one.passed] == [output], place


@pytest.mark.parametrize(("sequence", "num_tokens"), [(1, 13), (2, 7), (3, 7)])
def test_tokens_that_do_nothing_are_counted(packs, sequence, num_tokens):
    found = changes(make_forward(frozen=[sequence]), packs)
    assert found["changed tokens whose own state stays"] == num_tokens


@pytest.mark.parametrize("slot", [1, 2, 3])
def test_gradients_on_neighbours_and_of_ones_own(packs, slot):
    """One slot's gradient reaches one place beside it, padding too, or one token of the slot has none."""
    mine = packs["sequence_ids"] == slot

    def check(place=None, size=0.0):
        def size_of(number):
            size_BS = (packs["sequence_ids"] == number).astype(float)
            if number == slot and place is not None:
                size_BS[place] = size
            return size_BS

        sizes = [(packs["sequence_ids"] == number, size_of(number)) for number in (1, 2, 3)]
        return [found.largest for found in check_gradients(sizes)]

    assert check() == [0, 0]
    for place in np.ndindex(mine.shape):
        assert check(place, 0.5) == [0 if mine[place] else 0.5, 0]
        assert check(place, 0.0) == [0, int(mine[place])]


def test_a_steps_figures_and_gradients_are_compared():
    """Figures are relative to those of the sequences alone, gradients to the variable's largest."""
    objective = pretraining_objective("per_token")
    sums = dict.fromkeys(objective.sum_names, 4.0)
    model = SimpleNamespace(trainable_variables=[SimpleNamespace(path="kernel")])
    steps = {
        "packs": ([np.array([2.4, -8.0])], {**sums, "nsp_correct": 5.0, "mlm_loss": 2.0}),
        "unpacked": ([np.array([2.0, -8.0])], sums),
    }
    found = contamination._training_alone(steps.get, model, objective, "packs", "unpacked", 1e-5)
    assert {one.name: one.largest for one in found if one.largest} == {
        "unpacked: nsp_accuracy": 0.25,
        "unpacked: mlm_loss": 0.5,
        "unpacked: loss": 0.25,
        "unpacked: gradients of all weights": pytest.approx(0.05),
    }


def test_gradients_are_compared_with_their_tensor():
    """Rounding of a tensor that hardly learns is no fault; a fault of its size in another one is."""
    paths = ["block/query/kernel", "block/value/kernel", "block/key/bias"]
    alone = [np.array([1e-8, 0]), np.array([0.1, 0.05]), np.array([3e-13])]

    def result(*together):
        checks = contamination.compare_gradients(paths, [np.array(one) for one in together], alone, 1e-5)
        return [check.passed for check in checks]

    assert result([1e-8, 2e-12], [0.1, 0.05], [7e-13]) == [True, True]
    assert result([1e-8, 2e-11], [0.1, 0.05], [0]) == [False, True]
    assert result([1e-8, 0], [0.1, 0.05 + 2e-6], [0]) == [False, True]
    assert result([1e-8, 0], [0.1, 0.05], [2e-6]) == [True, False]
    assert result([np.nan, 0], [0.1, 0.05], [np.nan]) == [False, False]


def unbroken(operator, place):
    """An operator that takes each pack for one sequence; its positions are the argument of this place."""

    def broken(*arguments, **options):
        return operator(*arguments[:place], None, *arguments[place + 1 :], **options)

    return broken


def leaking_gradient(function, arguments, gradients):
    """The state before a chunk gets the gradient of that after it, past the start of a sequence, too."""
    state_BZE, *rest = pull_back(function, arguments, gradients)
    return state_BZE + gradients[0], *rest


pull_back = state_space_duality.pull_back
BLOCK = dataclasses.replace(next_tokens.CONFIG, num_hidden_layers=1)
BLOCK2 = dataclasses.replace(next_tokens.MAMBA2, num_hidden_layers=1, chunk_size=2)
FORWARD = {"neighbors: change of logits", "unpacked: logits", "unpacked: lm_loss"}
BACKWARD = {"neighbors: gradient on their embeddings", "unpacked: gradients of all weights"}
# An operator has the model, its part that is broken, and checks that fail
OPERATORS = {
    "sound": (BLOCK2, mamba2, "ssd_pack", mamba2.ssd_pack, set()),
    "scan": (BLOCK, mamba, "ssm_pack", unbroken(mamba.ssm_pack, 5), FORWARD | BACKWARD),
    "convolution": (BLOCK, mamba, "conv1d_pack", unbroken(mamba.conv1d_pack, 3), FORWARD | BACKWARD),
    "duality": (BLOCK2, mamba2, "ssd_pack", unbroken(mamba2.ssd_pack, 6), FORWARD | BACKWARD),
    "backward alone": (BLOCK2, state_space_duality, "pull_back", leaking_gradient, BACKWARD),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("leak", OPERATORS)
def test_leaking_operators_are_seen(monkeypatch, leak):
    config, module, function, broken, expected = OPERATORS[leak]
    monkeypatch.setattr(module, function, broken)
    # The second sequence begins in the second chunk and ends in the third
    batch = next_tokens.batch_of([[[3, 4, 5], [6, 7, 8]]], 6, 2)
    engine, rng = next_tokens.make_engine(config=config), np.random.default_rng(0)
    for weight in engine.model.weights:  # initial ones mix little
        weight.assign(np.asarray(weight) + rng.normal(size=weight.shape, scale=0.3))
    checks = contamination.audit(engine, batch)
    failed = {check.name for check in checks if not check.passed}
    assert failed == expected if leak in ("sound", "backward alone") else failed >= expected
