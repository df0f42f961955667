"""Ours, packed, computes what `ModernBertForMaskedLM` of transformers computes from each sequence alone."""

import dataclasses
import functools

import numpy as np
import pytest
from modern_bert_models import BIASES, CONFIG, make_reference
from packs import batch_of, random_sequence
from reference import import_reference
from reference_models import load_ours

from bert_packed.architectures.modern_bert import model as modern_bert
from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import MASKED_LM
from bert_packed.objectives.pretraining import masked_lm_objective
from bert_packed.training import engines
from bert_packed.training.backend import compiled

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
TOLERANCE = 1e-5  # of the largest
# A full pack, padding at the end, sequences shorter and longer than the window of 5
LENGTHS = [[3, 14, 7], [1, 20], [24], [8, 8, 2, 1]]
MAX_SEQ_LENGTH = 24


@functools.cache
def packs():
    rng = np.random.default_rng(0)
    return [[random_sequence(rng, length) for length in pack] for pack in LENGTHS]


def make_batch():
    batch = batch_of(packs(), MAX_SEQ_LENGTH, num_slots=4, num_predictions=12)
    assert batch["sequence_ids"].max(axis=1).tolist() == [3, 2, 1, 4]
    return batch


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """By the biases that it has: our model and theirs."""

    @functools.cache
    def make(biases="as_published"):
        reference = make_reference(dataclasses.replace(CONFIG, **BIASES[biases]))
        return load_ours(tmp_path_factory.mktemp("hf"), reference, MASKED_LM), reference

    return make


def differences(model, reference, **changes):
    """The largest differences of hidden states and of logits of each sequence, of the largest.

    `changes` are arrays of the batch to put in the place of ours.
    """
    torch, _ = import_reference()
    batch = make_batch()

    def forward(batch):
        hidden_BSD = model.encode(batch)
        return hidden_BSD, model.apply_heads(hidden_BSD, batch)["mlm_logits"]

    hidden, logits = map(np.asarray, compiled(forward, model)({**batch, **changes}))
    found = []
    for row, pack in enumerate(packs()):
        for slot, sequence in enumerate(pack):
            with torch.no_grad():
                outputs = reference(input_ids=torch.tensor([sequence.tokens]), output_hidden_states=True)
            want = (outputs.hidden_states[-1][0], outputs.logits[0][sequence.prediction_positions])
            got = (
                hidden[row][batch["sequence_ids"][row] == slot + 1],
                logits[row][batch["prediction_sequences"][row] == slot + 1],
            )
            for one, other in zip(got, want, strict=True):
                assert one.shape == other.shape and len(one)
                found.append(np.abs(one - other.numpy()).max() / np.abs(other.numpy()).max())
    assert len(found) == 20
    return np.array(found).reshape(-1, 2)


@pytest.mark.parametrize("biases", BIASES)
def test_hidden_states_and_logits_equal(both, biases):
    assert differences(*both(biases)).max() <= TOLERANCE


@pytest.mark.parametrize("biases", BIASES)
def test_loss_and_every_gradient_equal(both, biases):
    """The mean over predictions: theirs from one sequence after another, ours from the packs at once."""
    torch, _ = import_reference()
    model, reference = both(biases)
    engine = engines.make_engine(model, masked_lm_objective("per_token"), micro_batch_size=2)
    gradients = compiled(functools.partial(engine.gradients, training=False), model)
    got, sums = gradients(make_batch())
    sequences = [sequence for pack in packs() for sequence in pack]
    num_predictions = sum(len(sequence.prediction_ids) for sequence in sequences)
    total = 0.0
    reference.zero_grad()
    for sequence in sequences:
        labels = np.full(len(sequence.tokens), -100)
        labels[sequence.prediction_positions] = sequence.prediction_ids
        loss = reference(input_ids=torch.tensor([sequence.tokens]), labels=torch.tensor(labels[None])).loss
        loss = loss * len(sequence.prediction_ids) / num_predictions  # theirs is a mean over a sequence
        loss.backward()
        total += loss.item()
    assert float(sums["mlm_loss"]) / num_predictions == pytest.approx(total, rel=1e-5)
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    assert len(got) == len(theirs)
    for variable, gradient in zip(model.trainable_variables, got, strict=True):
        name, gradient = variable.path.partition("/")[2], np.asarray(gradient)
        want = theirs.pop(theirs_name(name))
        want = want.T if name.endswith("kernel") else want
        assert gradient.shape == want.shape, name
        assert np.abs(gradient - want).max() <= TOLERANCE * np.abs(want).max(), name


def theirs_name(name):
    """The name of theirs for a variable of ours, found without the table that is tested."""
    for ours, other in (
        ("predictions/transform", "head.dense"),
        ("predictions/LayerNorm", "head.norm"),
        ("predictions/output_bias", "decoder.bias"),
        ("token_embeddings", "embeddings.tok_embeddings.weight"),
        ("embeddings_LayerNorm", "embeddings.norm"),
        ("attention_LayerNorm", "attn_norm"),
        ("feed_forward_LayerNorm", "mlp_norm"),
        ("final_LayerNorm", "final_norm"),
        ("attention/qkv", "attn.Wqkv"),
        ("attention/output", "attn.Wo"),
        ("feed_forward/intermediate", "mlp.Wi"),
        ("feed_forward/output", "mlp.Wo"),
        ("modern_bert/", "model."),
        ("layer_", "layers."),
        ("kernel", "weight"),
        ("gamma", "weight"),
        ("beta", "bias"),
        ("/", "."),
    ):
        name = name.replace(ours, other)
    return name


# ---- faults that these comparisons must see


def test_a_window_that_reaches_into_other_sequences_is_seen(both, monkeypatch):
    attend = modern_bert.attend_in_window

    def attend_to_all(heads, sequence_ids_BS, *arguments):
        return attend(heads, sequence_ids_BS * 0, *arguments)

    monkeypatch.setattr(modern_bert, "attend_in_window", attend_to_all)
    found = differences(*both())
    alone = np.concatenate(LENGTHS).tolist().index(MAX_SEQ_LENGTH)  # the pack of one sequence
    assert found[alone].max() <= TOLERANCE
    assert np.delete(found, alone, axis=0).min() > 100 * TOLERANCE


@pytest.mark.parametrize("change", [{"local_rope_theta": 5000.0}, {"local_attention": 12}])
def test_local_blocks_with_angles_or_a_window_of_others_are_seen(both, change):
    model, reference = both()
    other = build_model(MASKED_LM, dataclasses.replace(model.config, **change), seed=1)
    for ours, theirs in zip(other.weights, model.weights, strict=True):
        ours.assign(theirs)
    found = differences(other, reference)
    lengths = np.concatenate(LENGTHS)
    is_same = lengths == 1 if "local_rope_theta" in change else lengths <= CONFIG.window + 1
    assert found[is_same].max() <= TOLERANCE < 100 * TOLERANCE < found[~is_same].max(axis=1).min()


def test_positions_that_do_not_count_tokens_are_seen(both):
    positions_BS = make_batch()["position_ids"]
    found = differences(*both(), position_ids=2 * positions_BS)
    assert found[np.concatenate(LENGTHS) > 1].max(axis=1).min() > 100 * TOLERANCE


def test_positions_that_go_on_through_the_pack_are_seen_in_long_packs(both):
    """Attention reads differences of positions: what goes on shows only as rounding of large angles."""
    on_BS = np.broadcast_to(np.arange(MAX_SEQ_LENGTH, dtype=np.int32), (len(LENGTHS), MAX_SEQ_LENGTH))
    assert differences(*both(), position_ids=on_BS).max() <= TOLERANCE
    assert differences(*both(), position_ids=on_BS + 8000).max() > TOLERANCE
