"""Ours, packed, computes what Mambas of transformers compute on torch from each sequence alone.

Theirs takes no boundaries on this path: only a separate row for every sequence keeps them apart.
"""

import functools

import numpy as np
import pytest
from foreign_mamba import CONFIG, LENGTHS, draw_sequences, make_batch
from next_tokens import batch_of
from reference import import_reference
from reference_models import load_ours, random_reference

from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.schema import CAUSAL_LM
from bert_packed.training import engines
from bert_packed.training.backend import compiled

pytestmark = pytest.mark.both_backends
SHAPE = {name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
MAMBA2 = {"state_size": 5, "num_heads": 6, "head_dim": 4, "n_groups": 1, "chunk_size": 4}
LIMITS = {"time_step_limit": (0.3, 1.5), "tie_word_embeddings": False}
# Of transformers: the kind, its settings, and the largest difference allowed, of the largest
MODELS = {
    "mamba": ("Mamba", {"state_size": 5, "time_step_rank": 3, "use_bias": True}, 1e-5),
    "mamba, no biases": ("Mamba", {"state_size": 5, "time_step_rank": 3, "use_conv_bias": False}, 1e-5),
    "mamba2": ("Mamba2", {**MAMBA2, "tie_word_embeddings": True, "use_conv_bias": False}, 2e-5),
    "mamba2, groups": ("Mamba2", {**MAMBA2, **LIMITS, "n_groups": 3, "use_bias": True}, 2e-5),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def make_reference(name):
    """A model of transformers in which every tensor is random, those that start at 0 or 1 too."""
    _, transformers = import_reference()
    kind, settings, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **settings)
    return random_reference(f"{kind}ForCausalLM", config)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """By the name of one of `MODELS`: our model, the same compiled, and theirs."""

    @functools.cache
    def make(name):
        reference = make_reference(name)
        model = load_ours(tmp_path_factory.mktemp("hf"), reference, CAUSAL_LM)
        return model, compiled(lambda batch: model(batch)["logits"], model), reference

    return make


def logits_of(reference, tokens):
    torch, _ = import_reference()
    with torch.no_grad():
        return reference(input_ids=torch.tensor([tokens])).logits[0].numpy()


def differences(forward, reference):
    """Of each sequence, by (slot, length): the largest difference of its logits, of the largest logit."""
    packs = draw_sequences()
    batch = make_batch(packs)
    got = np.asarray(forward(batch))
    found = []
    for row, pack in enumerate(packs):
        for slot, tokens in enumerate(pack):
            want = logits_of(reference, tokens)
            ours = got[row][batch["sequence_ids"][row] == slot + 1]
            assert ours.shape == want.shape == (len(tokens), CONFIG.vocab_size)
            found.append((slot, len(tokens), np.abs(ours - want).max() / np.abs(want).max()))
    return found


@pytest.mark.parametrize("name", ["mamba", SLOW[1], "mamba2", "mamba2, groups"])
def test_logits_of_packs_equal_those_of_each_sequence_alone(both, name):
    _, forward, reference = both(name)
    found = differences(forward, reference)
    assert len(found) == 14 and sum(length < CONFIG.conv_kernel for _, length, _ in found) == 8
    assert max(difference for *_, difference in found) <= MODELS[name][2]


def test_a_sequence_starts_at_every_place_of_a_chunk():
    starts = {
        sum(lengths[:slot]) % MAMBA2["chunk_size"] for lengths in LENGTHS for slot in range(len(lengths))
    }
    assert starts == set(range(MAMBA2["chunk_size"]))


@pytest.mark.parametrize("name", [SLOW[0], "mamba2", "mamba2, groups"])
@pytest.mark.usefixtures("uncompiled")
def test_loss_and_every_gradient_equal(both, name):
    """The mean over predictions: theirs from one sequence after another, ours from the packs at once."""
    torch, _ = import_reference()
    model, _, reference = both(name)
    packs = draw_sequences(1)
    batch = make_batch(packs)
    objective = next_token_objective("per_token")
    engine = engines.make_engine(model, objective, micro_batch_size=len(packs))
    got, sums = engine.gradients(batch, training=False)
    num_predictions = sum(len(tokens) - 1 for pack in packs for tokens in pack)
    total = 0.0
    reference.zero_grad()
    for tokens in (tokens for pack in packs for tokens in pack if len(tokens) > 1):
        logits = reference(input_ids=torch.tensor([tokens])).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
        (loss / num_predictions).backward()
        total += loss.item()
    assert float(sums["lm_nll"]) == pytest.approx(total, rel=1e-5)
    assert_gradients_equal(model, got, reference, MODELS[name][2])


def assert_gradients_equal(model, got, reference, tolerance):
    want = dict(reference.named_parameters())
    for variable, gradient in zip(model.trainable_variables, got, strict=True):
        name = variable.path.removeprefix(f"{model.name}/")
        theirs = as_ours(name, want)
        gradient = np.asarray(gradient)
        assert gradient.shape == theirs.shape, name
        assert np.abs(gradient - theirs).max() <= tolerance * np.abs(theirs).max(), name


@pytest.mark.usefixtures("uncompiled")
def test_a_sequence_cut_across_packs_equals_theirs_with_a_cache(tmp_path, name="mamba2, groups"):
    """Loss and every gradient of the second pack; the first is data, as a detached cache is.

    Their Mamba-1 takes one token with a cache, not several.
    """
    torch, _ = import_reference()
    reference = make_reference(name)
    model = load_ours(tmp_path, reference, CAUSAL_LM, num_rows=1)
    tokens = np.random.default_rng(3).integers(1, 31, 21).tolist()
    whole = batch_of([[tokens]], 21, 1)
    for cut in (1, 2, 9):
        parts = [
            {key: values[:, place] if values.shape[1] == 21 else values for key, values in whole.items()}
            for place in (slice(cut), slice(cut, None))
        ]
        engine = engines.make_engine(model, next_token_objective("per_token", goes_on=True))
        engine.gradients(parts[0], training=True)
        got, sums = engine.gradients(parts[1], training=True)
        reference.zero_grad()
        with torch.no_grad():
            cache = reference(input_ids=torch.tensor([tokens[:cut]]), use_cache=True).cache
        logits = reference(input_ids=torch.tensor([tokens[cut:]]), cache=cache, use_cache=True).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[cut + 1 :]))
        loss.backward()
        assert float(sums["lm_nll"]) == pytest.approx(loss.item() * (20 - cut), rel=1e-5)
        assert_gradients_equal(model, got, reference, MODELS[name][2])


def as_ours(name, parameters):
    """The gradient of theirs that belongs to a variable of ours, found without the table that is tested."""
    parts = name.split("/")
    theirs = name.replace("layers_", "layers.").replace("/", ".")
    theirs = theirs.replace("kernel", "weight").replace("conv1d_", "conv1d.")
    if parts[-2:] == ["RMSNorm", "scale"]:
        theirs = theirs.replace("RMSNorm.scale", "norm.weight")
        theirs = "backbone.norm_f.weight" if theirs == "backbone.norm.weight" else theirs
    if name in ("backbone/embeddings", "lm_head"):
        theirs += ".weight"
    values = parameters[theirs].grad.numpy()
    if parts[-1] == "conv1d_kernel":
        return values[:, 0, :].T
    return values.T if parts[-1] == "kernel" else values
