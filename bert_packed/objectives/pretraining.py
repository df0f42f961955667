"""Pre-training losses of packs, as sums that weight each sequence as if it were alone.

They are of masked tokens (masked LM) and next sentences, or of next tokens (causal LM), where no prediction
crosses a boundary: records have no label for the last token of a sequence.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, V vocabulary.
"""

import dataclasses
import functools

from keras import ops

from bert_packed.architectures.registry import FAMILIES, MASKED_LM, OBJECTIVE_HEADS, PRETRAINING, family_of
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import MASKED_TOKENS, NEXT_TOKENS, NEXT_TOKENS_OF_ROWS, RECORDED
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right
from bert_packed.schema import CAUSAL_LM, FORMS, MLM, MLM_NSP

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
        # The loss is times 0 rather than left out: the head's weights still need a gradient
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
            # This one is comparable across tokenizers, unlike the two above
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


def choose_objective(objective, model_config, config, num_rows=0):
    """The `Objective` of a run; raises `InputError` where the model is of a family without its head.

    Args:
        objective: One of `schema.OBJECTIVES`.
        config: Anything with `mlm_loss` and `lm_loss`.
        num_rows: R, rows in which packs follow one another; 0 for none.
    """
    family, head = family_of(model_config), OBJECTIVE_HEADS[objective]
    if head not in family.heads:
        able = [one.name for one in FAMILIES.values() if head in one.heads]
        raise InputError(
            f"`bert_config_file` must be a {' or '.join(able)} for objective={objective}. "
            f"Received: a {family.name}."
        )
    if objective == CAUSAL_LM:
        return next_token_objective(config.lm_loss, goes_on=num_rows > 0)
    if objective == MLM:
        return masked_lm_objective(config.mlm_loss)
    return pretraining_objective(config.mlm_loss, not model_config.ablation_no_next_sentence)


def check_losses(config, objective):
    """Raise `InputError` where the loss of the other objective is set, which nothing would read."""
    unread = "mlm_loss" if objective == CAUSAL_LM else "lm_loss"
    default = next(field.default for field in dataclasses.fields(config) if field.name == unread)
    if getattr(config, unread) != default:
        raise InputError(
            f"`{unread}` must not be given for objective={objective}. Received: {getattr(config, unread)}."
        )


def check_records(config, name, packs):
    """Raise `InputError` where the records that a flag names are not for the objective."""
    # The arrays of another form would be missing in the first batch, without the flag's name
    if packs.files and packs.spec.objective != FORMS[config.objective]:
        raise InputError(
            f"`{name}` must hold records for objective={config.objective}. Received: {packs.files[0]}, for "
            f"{packs.spec.objective}."
        )
    # Such records have the arrays of next sentences all the same, filled with a constant
    made_for_mlm = any(manifest.get("objective") == MLM for manifest in packs.manifests)
    if config.objective == MLM_NSP and made_for_mlm:
        raise InputError(
            f"`{name}` must hold next-sentence labels for objective={MLM_NSP}. Received: {packs.files[0]}, "
            f"made by --objective={MLM}."
        )
