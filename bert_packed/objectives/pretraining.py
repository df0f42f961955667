"""Masked-LM and next-sentence losses of packs, as sums that weight each sequence as if it were alone.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, V vocabulary.
"""

import functools

from keras import ops

from bert_packed.architectures.registry import MASKED_LM, PRETRAINING
from bert_packed.objectives.features import MASKED_TOKENS, RECORDED
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right

_DIVIDED_BY = {"per_sequence": "num_sequences", "per_token": "num_predictions"}
_MLM_ACCURACIES = {
    "mlm_accuracy": ("mlm_sequence_accuracy", "num_predicted_sequences"),
    "mlm_token_accuracy": ("mlm_correct", "num_predictions"),
}


def pretraining_objective(mlm_loss, next_sentence=True):
    """Masked LM, `mlm_loss` as in `prediction_weights`, and next sentences, optionally with a loss of 0."""
    return Objective(
        head=PRETRAINING,
        features=RECORDED,
        outputs={"mlm_logits": "P", "nsp_logits": "K"},
        sums=functools.partial(pretraining_sums, mlm_loss=mlm_loss, next_sentence=next_sentence),
        counts=pretraining_counts,
        losses={"mlm_loss": _DIVIDED_BY[mlm_loss], "nsp_loss": "num_sequences"},
        accuracies={**_MLM_ACCURACIES, "nsp_accuracy": ("nsp_correct", "num_sequences")},
    )


def masked_lm_objective(mlm_loss):
    """Masked LM alone."""
    return Objective(
        head=MASKED_LM,
        features=MASKED_TOKENS,
        outputs={"mlm_logits": "P"},
        sums=functools.partial(masked_lm_sums, mlm_loss=mlm_loss),
        counts=pretraining_counts,
        losses={"mlm_loss": _DIVIDED_BY[mlm_loss]},
        accuracies=_MLM_ACCURACIES,
    )


def prediction_weights(prediction_sequences_BP, num_slots, mlm_loss):
    """Weight of each masked-LM prediction: float32 `[B, P]`.

    "per_sequence" is Listing 1 of "Packing: Towards 2x NLP BERT Acceleration". "per_token" is Section 3.2.3
    of "Efficient Sequence Packing", google-research/bert and Hugging Face.

        sequences      [1    1    1    2   0]       0 is an unused prediction
        per_sequence   [1/3  1/3  1/3  1   0]
        per_token      [1    1    1    1   0]
    """
    used_BP = ops.cast(prediction_sequences_BP > 0, "float32")
    if mlm_loss == "per_token":
        return used_BP
    belongs_BPK = _belongs(prediction_sequences_BP, num_slots)
    attempted_BK = ops.sum(belongs_BPK, axis=1)
    attempted_BP = ops.sum(belongs_BPK * attempted_BK[:, None, :], axis=-1)
    return used_BP / ops.maximum(attempted_BP, 1.0)


def pretraining_sums(outputs, batch, mlm_loss, next_sentence=True):
    """Sums over a batch of packs: `nsp_loss`, `nsp_correct`, and those of `masked_lm_sums`."""
    slot_weights_BK = batch["slot_weights"]
    nsp_nll_BK, nsp_right_BK = nll_and_right(outputs["nsp_logits"], batch["nsp_labels"])
    return {
        # Times 0, not left out: the head's weights still need a gradient
        "nsp_loss": ops.sum(nsp_nll_BK * slot_weights_BK) * float(next_sentence),
        "nsp_correct": ops.sum(nsp_right_BK * slot_weights_BK),
        **masked_lm_sums(outputs, batch, mlm_loss),
    }


def masked_lm_sums(outputs, batch, mlm_loss):
    """Sums of the masked LM, and `pretraining_counts`: dict of float32 scalars.

    `mlm_correct` counts predictions; `mlm_sequence_accuracy` sums each sequence's share of correct ones.
    """
    sequences_BP, num_slots = batch["prediction_sequences"], batch["slot_weights"].shape[1]
    nll_BP, right_BP = nll_and_right(outputs["mlm_logits"], batch["prediction_ids"])
    share_BP = prediction_weights(sequences_BP, num_slots, "per_sequence")
    used_BP = prediction_weights(sequences_BP, num_slots, "per_token")
    loss_weights_BP = share_BP if mlm_loss == "per_sequence" else used_BP
    return {
        "mlm_loss": ops.sum(nll_BP * loss_weights_BP),
        "mlm_correct": ops.sum(right_BP * used_BP),
        "mlm_sequence_accuracy": ops.sum(right_BP * share_BP),
        **pretraining_counts(batch),
    }


def pretraining_counts(batch):
    """Predictions, sequences with a prediction, and `count_sequences`."""
    sequences_BP, num_slots = batch["prediction_sequences"], batch["slot_weights"].shape[1]
    return {
        "num_predictions": ops.sum(prediction_weights(sequences_BP, num_slots, "per_token")),
        "num_predicted_sequences": ops.sum(prediction_weights(sequences_BP, num_slots, "per_sequence")),
        **count_sequences(batch),
    }


def _belongs(prediction_sequences_BP, num_slots):
    """1 if prediction p belongs to sequence k + 1: float32 `[B, P, K]`."""
    slots_K = ops.arange(1, num_slots + 1, dtype="float32")
    return ops.cast(ops.equal(prediction_sequences_BP[:, :, None], slots_K), "float32")
