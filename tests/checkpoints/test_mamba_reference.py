"""Ours, packed, computes what `MambaForCausalLM` of transformers computes on torch from each sequence alone.

Theirs takes no boundaries on this path: only a separate row for every sequence keeps them apart.
"""

import dataclasses
import functools

import numpy as np
import pytest
from foreign_mamba import CONFIG, draw_sequences, make_batch
from reference import import_reference
from reference_models import load_ours, random_reference

from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.schema import CAUSAL_LM
from bert_packed.training import engines
from bert_packed.training.backend import compiled

pytestmark = pytest.mark.both_backends
# Of the largest
TOLERANCE = 1e-5
BIASES = {"all": {"use_bias": True}, "none": {"use_conv_bias": False}}


def make_reference(**changes):
    """A model of transformers in which every tensor is random, those that start at 0 or 1 too."""
    _, transformers = import_reference()
    config = dataclasses.replace(CONFIG, **{"use_bias": False, **changes})
    names = {"hidden_size", "vocab_size", "num_hidden_layers", "state_size", "time_step_rank"}
    names |= {"use_bias", "use_conv_bias", "layer_norm_epsilon"}
    given = {name: getattr(config, name) for name in names}
    return random_reference("MambaForCausalLM", transformers.MambaConfig(**given))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """By the biases that it has: our model, the same compiled, and theirs."""

    @functools.cache
    def make(biases):
        reference = make_reference(**BIASES[biases])
        model = load_ours(tmp_path_factory.mktemp("hf"), reference, CAUSAL_LM)
        return model, compiled(lambda batch: model(batch)["logits"], model), reference

    return make


def logits_of(reference, tokens):
    torch, _ = import_reference()
    with torch.no_grad():
        return reference(input_ids=torch.tensor([tokens])).logits[0].numpy()


def differences(forward, reference, **changes):
    """Of each sequence, by (slot, length): the largest difference of its logits, of the largest logit.

    `changes` are arrays of the batch to put in the place of ours.
    """
    packs = draw_sequences()
    batch = make_batch(packs)
    got = np.asarray(forward({**batch, **changes}))
    found = []
    for row, pack in enumerate(packs):
        for slot, tokens in enumerate(pack):
            want = logits_of(reference, tokens)
            ours = got[row][batch["sequence_ids"][row] == slot + 1]
            assert ours.shape == want.shape == (len(tokens), CONFIG.vocab_size)
            found.append((slot, len(tokens), np.abs(ours - want).max() / np.abs(want).max()))
    return found


@pytest.mark.parametrize("biases", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_logits_of_packs_equal_those_of_each_sequence_alone(both, biases):
    _, forward, reference = both(biases)
    found = differences(forward, reference)
    assert len(found) == 14 and sum(length < CONFIG.conv_kernel for _, length, _ in found) == 8
    assert max(difference for *_, difference in found) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_loss_and_every_gradient_equal(both):
    """The mean over predictions: theirs from one sequence after another, ours from the packs at once."""
    torch, _ = import_reference()
    model, _, reference = both("all")
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
    want = dict(reference.named_parameters())
    for variable, gradient in zip(model.trainable_variables, got, strict=True):
        name = variable.path.removeprefix("mamba/")
        theirs = as_ours(name, want)
        gradient = np.asarray(gradient)
        assert gradient.shape == theirs.shape, name
        assert np.abs(gradient - theirs).max() <= TOLERANCE * np.abs(theirs).max(), name


def as_ours(name, parameters):
    """The gradient of theirs that belongs to a variable of ours, found without the table that is tested."""
    parts = name.split("/")
    theirs = name.replace("layers_", "layers.").replace("/", ".")
    theirs = theirs.replace("kernel", "weight").replace("conv1d_", "conv1d.")
    if parts[-2:] == ["RMSNorm", "scale"]:
        theirs = theirs.replace("RMSNorm.scale", "norm.weight")
        theirs = "backbone.norm_f.weight" if theirs == "backbone.norm.weight" else theirs
    if name == "backbone/embeddings":
        theirs += ".weight"
    values = parameters[theirs].grad.numpy()
    if parts[-1] == "conv1d_kernel":
        return values[:, 0, :].T
    return values.T if parts[-1] == "kernel" else values
