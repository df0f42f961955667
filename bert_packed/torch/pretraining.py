"""Pre-training heads of `transformers` for every sequence of a pack, and a loss independent of packing.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, D model width,
V vocabulary.
"""

import torch
from torch.nn import functional

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.packing.arguments import check_choice

ATTENTIONS = ("sdpa", "eager")  # those that take a 4D mask
WEIGHTINGS = ("per_sequence", "per_token")


class PackedBertForPreTraining(torch.nn.Module):
    """Wraps a `transformers.BertForPreTraining`, whose parameters it trains, for packs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        """Dict of `mlm_logits` `[B, P, V]` and `nsp_logits` `[B, K, 2]` from stacked items of
        `PackedDataset`.

        A missing `attention_mask` is made from `sequence_ids`. Raises `ValueError` where the model's
        attention would ignore a 4D mask, and so let sequences see each other.
        """
        bert, heads = self.model.bert, self.model.cls
        check_attention(self.model.config)  # not in `__init__`: it may change
        mask_B1SS = batch.get("attention_mask")
        if mask_B1SS is None:
            mask_B1SS = attention_mask(batch["sequence_ids"], self.model.dtype)
        hidden_BSD = bert(
            input_ids=batch["input_ids"],
            attention_mask=mask_B1SS,
            token_type_ids=batch["token_type_ids"],
            position_ids=batch["position_ids"],
        ).last_hidden_state
        cls_BKD = torch.take_along_dim(hidden_BSD, batch["cls_positions"][..., None], dim=1)
        predicted_BPD = torch.take_along_dim(hidden_BSD, batch["masked_lm_positions"][..., None], dim=1)
        # The pooler takes the first token of each row, so each [CLS] becomes a row
        pooled = bert.pooler(cls_BKD.flatten(0, 1)[:, None])
        return {
            "mlm_logits": heads.predictions(predicted_BPD),
            "nsp_logits": heads.seq_relationship(pooled).unflatten(0, cls_BKD.shape[:2]),
        }


def check_attention(config):
    """Raise `ValueError` where a model's attention would ignore a 4D mask."""
    # `set_attn_implementation` is public, and nothing that reads it
    check_choice("attn_implementation", config._attn_implementation, ATTENTIONS)


def pretraining_counts(batch):
    """Divisors of the loss: dict of float32 scalars `num_sequences` and `num_predictions`."""
    return {
        "num_sequences": batch["next_sentence_weights"].sum(),
        "num_predictions": (batch["masked_lm_sequences"] > 0).sum().float(),
    }


def pretraining_loss(logits, batch, mlm_loss="per_sequence", counts=None):
    """Masked-LM and next-sentence loss of sequences, each weighted as if it were alone in its pack.

        sequences      [1    1    1    2   0]
        per_sequence   [1/3  1/3  1/3  1   0]   / num_sequences
        per_token      [1    1    1    1   0]   / num_predictions, as in transformers

    Args:
        logits: Output of `PackedBertForPreTraining`.
        batch: Its input; next-sentence labels of -100 are ignored.
        mlm_loss: "per_sequence" or "per_token".
        counts: `pretraining_counts`, summed over the step's micro-batches and ranks; None where this batch is
            the step. `DistributedDataParallel` averages gradients over ranks: multiply the loss by their
            number.

    Returns:
        Dict of float32 scalars: `mlm_loss`, `nsp_loss` and their sum, `loss`.
    """
    check_choice("mlm_loss", mlm_loss, WEIGHTINGS)
    counts = pretraining_counts(batch) if counts is None else counts
    sequences_BP = batch["masked_lm_sequences"]
    weights_BP = (sequences_BP > 0).float()
    if mlm_loss == "per_sequence":
        num_slots = batch["next_sentence_weights"].shape[1]
        made = torch.zeros(len(sequences_BP), num_slots + 1, device=sequences_BP.device)
        made = made.scatter_add(1, sequences_BP, weights_BP)  # predictions of each sequence, unused ones at 0
        weights_BP = weights_BP / made.gather(1, sequences_BP).clamp(min=1)
    mlm = (_nll(logits["mlm_logits"], batch["masked_lm_ids"]) * weights_BP).sum()
    nsp = (_nll(logits["nsp_logits"], batch["next_sentence_labels"]) * batch["next_sentence_weights"]).sum()
    # Divisors are clamped, so that a step of empty packs has a loss of 0
    num_sequences, num_predictions = (
        torch.as_tensor(counts[name]).clamp(min=1) for name in ("num_sequences", "num_predictions")
    )
    losses = {
        "mlm_loss": mlm / (num_sequences if mlm_loss == "per_sequence" else num_predictions),
        "nsp_loss": nsp / num_sequences,
    }
    return {"loss": losses["mlm_loss"] + losses["nsp_loss"], **losses}


def _nll(logits, labels):
    """Negative log-likelihood of labels `[...]` by logits `[..., n]`: float32, 0 for ignored labels."""
    flat = functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return flat.unflatten(0, labels.shape)
