"""Next-token losses of packs, as sums that weight each sequence as if it were alone.

No prediction crosses a boundary: records have no label for the last token of a sequence.

Legend: B packs per batch, S pack length, K sequences per pack, V vocabulary.
"""

import functools

from keras import ops

from bert_packed.objectives.features import NEXT_TOKENS, NEXT_TOKENS_OF_ROWS
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right
from bert_packed.schema import CAUSAL_LM


def next_token_objective(weighting, goes_on=False):
    """Causal language modelling; `goes_on` is True where sequences continue from pack to pack in rows.

    `weighting` "per_token" is the mean over predictions, "per_sequence" the mean over sequences of the mean
    over their predictions.
    """
    return Objective(
        head=CAUSAL_LM,
        features=NEXT_TOKENS_OF_ROWS if goes_on else NEXT_TOKENS,
        outputs={"logits": "S"},
        sums=functools.partial(next_token_sums, weighting=weighting),
        counts=next_token_counts,
        losses={"lm_loss": "num_predictions" if weighting == "per_token" else "num_sequences"},
        accuracies={"lm_accuracy": ("lm_correct", "num_predictions")},
        perplexities={
            "perplexity": ("lm_nll", "num_predictions"),
            "sequence_perplexity": ("lm_sequence_nll", "num_predicted_sequences"),
            # Comparable across tokenizers, unlike the two above
            "byte_perplexity": ("lm_nll", "num_bytes"),
        },
    )


def prediction_shares(label_sequences_BS, slot_weights_BK):
    """Weights of predictions, per token and per sequence, and predictions per sequence: float32.

    label_sequences  [1    1    0  2  0  0]      0 is no prediction
    slot_weights     [1 1]                       0 is an unused slot
    used             [1    1    0  1  0  0]      [B, S]
    share            [1/2  1/2  0  1  0  0]      [B, S]
    made             [2 1]                       [B, K]
    """
    slots_K = ops.arange(1, slot_weights_BK.shape[1] + 1, dtype="int32")
    belongs_BSK = ops.cast(ops.equal(ops.cast(label_sequences_BS, "int32")[:, :, None], slots_K), "float32")
    belongs_BSK = belongs_BSK * ops.cast(slot_weights_BK, "float32")[:, None, :]
    made_BK = ops.sum(belongs_BSK, axis=1)
    share_BSK = belongs_BSK / ops.maximum(made_BK, 1.0)[:, None, :]
    return ops.sum(belongs_BSK, axis=-1), ops.sum(share_BSK, axis=-1), made_BK


def next_token_sums(outputs, batch, weighting):
    """Sums over a batch of packs, and `next_token_counts`: dict of float32 scalars.

    `lm_loss` is minimised; `lm_nll` is summed over predictions, and `lm_sequence_nll`, the mean over a
    sequence's predictions, over sequences.
    """
    nll_BS, right_BS = nll_and_right(outputs["logits"], batch["label_ids"])
    used_BS, share_BS, _ = prediction_shares(batch["label_sequences"], batch["slot_weights"])
    nll, sequence_nll = ops.sum(nll_BS * used_BS), ops.sum(nll_BS * share_BS)
    return {
        "lm_loss": nll if weighting == "per_token" else sequence_nll,
        "lm_nll": nll,
        "lm_sequence_nll": sequence_nll,
        "lm_correct": ops.sum(right_BS * used_BS),
        **next_token_counts(batch),
    }


def next_token_counts(batch):
    """Predictions, sequences with a prediction, bytes of text, and `count_sequences`."""
    used_BS, _, made_BK = prediction_shares(batch["label_sequences"], batch["slot_weights"])
    bytes_BK = ops.cast(batch["sequence_bytes"], "float32") * batch["slot_weights"]
    return {
        "num_predictions": ops.sum(used_BS),
        "num_predicted_sequences": ops.sum(ops.cast(made_BK > 0, "float32")),
        "num_bytes": ops.sum(bytes_BK),
        **count_sequences(batch),
    }
