"""Packing is invisible on torch, too: loss and gradients are those of each sequence alone, unpadded."""

import numpy as np
import plain_losses
import pytest
from packs import VOCAB_SIZE, batch_of, random_sequence, write_packs
from reference import import_reference
from tiny import MAX_SEQ_LENGTH
from transformers_models import build, differing, gradients_of

torch, _ = import_reference()

from bert_packed.torch import (  # noqa: E402  after the skip where torch is missing
    PackedBertForPreTraining,
    PackedDataset,
    pretraining_counts,
    pretraining_loss,
)

LENGTHS = [[3, 9, 4, 8], [5, 6, 10], [20], [2, 17], [1]]


@pytest.fixture(scope="module")
def packs():
    """Five packs of 4, 3, 1, 2 and 1 sequences, one of them without a prediction: lists of `Sequence`."""
    rng = np.random.default_rng(0)
    packs = [[random_sequence(rng, length) for length in pack] for pack in LENGTHS]
    packs[1][0] = random_sequence(rng, 5, num_predictions=0)
    return packs


@pytest.fixture(scope="module")
def batch(packs, tmp_path_factory):
    """The packs as a DataLoader gives them, from a file: with an empty one, of a rank that has one less."""
    path = tmp_path_factory.mktemp("packs") / "x.tfrecord"
    write_packs(path, packs, MAX_SEQ_LENGTH)
    dataset = PackedDataset(str(path), shuffle_buffer_size=1)
    items = [*dataset, *list(PackedDataset(str(path), rank=1, world_size=2))[-1:]]
    batch = torch.utils.data.default_collate(items)
    assert batch["sequence_ids"].amax(dim=1).tolist() == [4, 3, 1, 2, 1, 0]
    return batch


def test_items_are_the_packs(packs, batch):
    names = {
        "input_ids": "token_ids",
        "sequence_ids": "sequence_ids",
        "token_type_ids": "token_type_ids",
        "position_ids": "position_ids",
        "masked_lm_positions": "prediction_positions",
        "masked_lm_ids": "prediction_ids",
        "masked_lm_sequences": "prediction_sequences",
        "cls_positions": "cls_positions",
        "next_sentence_labels": "nsp_labels",
        "next_sentence_weights": "slot_weights",
    }
    want = batch_of([*packs, []], MAX_SEQ_LENGTH, num_slots=4, num_predictions=12)
    assert batch.keys() == {*names, "attention_mask"}
    for name, ours in names.items():
        np.testing.assert_array_equal(batch[name], want[ours], err_msg=name)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return gradients_of(model)


def loss_alone(model, sequence):
    """Loss of transformers for one sequence without padding, by its own `forward`."""
    labels = [-100] * len(sequence.tokens)
    for position, label in zip(sequence.prediction_positions, sequence.prediction_ids, strict=True):
        labels[position] = label
    outputs = model(
        input_ids=torch.tensor([sequence.tokens]),
        token_type_ids=torch.tensor([sequence.token_types]),
        labels=torch.tensor([labels]),
        next_sentence_label=torch.tensor([sequence.nsp_label]),
    )
    if sequence.prediction_ids:
        return outputs.loss
    next_sentence = torch.tensor([sequence.nsp_label])  # a mean over no prediction is NaN there
    return torch.nn.functional.cross_entropy(outputs.seq_relationship_logits, next_sentence)


@pytest.mark.parametrize(("attention", "has_mask"), [("sdpa", True), ("eager", False)])
def test_loss_and_gradients_are_those_of_each_sequence_alone(packs, batch, attention, has_mask):
    model = build("pretraining", attention).eval()
    sequences = [sequence for pack in packs for sequence in pack]
    alone = sum(loss_alone(model, sequence) for sequence in sequences) / len(sequences)
    want = gradients(model, alone)
    if not has_mask:
        batch = {name: values for name, values in batch.items() if name != "attention_mask"}
    losses = pretraining_loss(PackedBertForPreTraining(model)(batch), batch)
    assert losses["loss"].item() == pytest.approx(alone.item(), rel=1e-5)
    assert not differing(gradients(model, losses["loss"]), want)


def test_packs_without_their_mask_are_far_from_that(packs, batch):
    """The test above could not tell otherwise; and a boolean mask is none where attention is eager."""
    for attention, change in (
        ("sdpa", {"attention_mask": torch.zeros_like(batch["attention_mask"])}),
        ("eager", {"attention_mask": batch["attention_mask"] == 0}),
        ("sdpa", {"position_ids": torch.arange(MAX_SEQ_LENGTH).expand(6, -1)}),
    ):
        packed = PackedBertForPreTraining(build("pretraining", attention).eval())
        want = pretraining_loss(packed(batch), batch)["loss"].item()
        found = pretraining_loss(packed({**batch, **change}), batch)["loss"].item()
        assert abs(found - want) > 1e-3 * want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_losses_are_those_of_a_plain_loop(packs, batch, mlm_loss, dtype):
    """Logits alone are compared, in float64; a softmax in bfloat16 is a hundred times further away."""
    ours = batch_of([*packs, []], MAX_SEQ_LENGTH, num_slots=4, num_predictions=12)
    torch.manual_seed(1)
    shapes = {"mlm_logits": (6, 12, VOCAB_SIZE), "nsp_logits": (6, 4, 2)}
    logits = {name: (torch.randn(shape) * 3).to(dtype).requires_grad_() for name, shape in shapes.items()}
    wide = {name: values.detach().double().numpy() for name, values in logits.items()}
    want, found = plain_losses.pretraining(wide, ours, mlm_loss), pretraining_loss(logits, batch, mlm_loss)
    for name, value in pretraining_counts(batch).items():
        assert value.item() == want.sums[name]
    for name, value in found.items():
        assert value.dtype == torch.float32 and value.item() == pytest.approx(want.means[name], rel=1e-5)
    found["loss"].backward()
    for name, values in logits.items():
        difference = np.abs(values.grad.double().numpy() - want.gradients[name]).max()
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert difference <= tolerance * np.abs(want.gradients[name]).max(), name


def test_packs_for_masked_lm_alone_teach_no_next_sentences(batch):
    """Their labels are -100, as `PackedDataset` gives them by the manifest."""
    packed = PackedBertForPreTraining(build("pretraining").eval())
    for labels in (batch["next_sentence_labels"], torch.full_like(batch["next_sentence_labels"], -100)):
        losses = pretraining_loss(packed(batch), {**batch, "next_sentence_labels": labels})
        heads = {
            name: values
            for name, values in gradients(packed, losses["loss"]).items()
            if "seq_relationship" in name or "pooler" in name
        }
        has_labels = bool((labels >= 0).any())
        assert len(heads) == 4 and all(bool(values.any()) == has_labels for values in heads.values())
    assert losses["nsp_loss"].item() == 0 and losses["loss"] == losses["mlm_loss"]


@pytest.mark.parametrize("mlm_loss", ["per_sequence", "per_token"])
def test_micro_batches_add_up_to_the_step(batch, mlm_loss):
    packed = PackedBertForPreTraining(build("pretraining").eval())
    whole = pretraining_loss(packed(batch), batch, mlm_loss)["loss"]
    want = gradients(packed, whole)
    counts = pretraining_counts(batch)
    parts = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 1), slice(1, 6))]
    losses = [pretraining_loss(packed(part), part, mlm_loss, counts)["loss"] for part in parts]
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-5)
    assert not differing(gradients(packed, sum(losses)), want)


def test_an_empty_pack_changes_nothing(batch):
    packed = PackedBertForPreTraining(build("pretraining").eval())
    full = {name: values[:5] for name, values in batch.items()}
    want = pretraining_loss(packed(full), full)
    found = pretraining_loss(packed(batch), batch)
    for name, value in want.items():
        assert found[name].item() == pytest.approx(value.item(), rel=1e-6)
    empty = {name: values[5:] for name, values in batch.items()}
    assert {name: v.item() for name, v in pretraining_loss(packed(empty), empty).items()} == {
        "loss": 0,
        "mlm_loss": 0,
        "nsp_loss": 0,
    }


def test_mistakes(batch):
    model = build("pretraining").eval()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match=r"`attn_implementation` must be one of sdpa, eager\. Received: 'flash"
    ):
        PackedBertForPreTraining(model)(batch)
    with pytest.raises(ValueError, match=r"`mlm_loss` must be one of per_sequence, per_token\. Received: 'x"):
        pretraining_loss({}, batch, "x")
