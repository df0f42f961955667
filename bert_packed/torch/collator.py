"""Packs for `transformers.Trainer` and any DataLoader: collation, whole data sets, and the loss of sequences.

Legend: n sequences, B packs, S pack length, K sequences per pack, V vocabulary.
"""

import numpy as np
import torch
from torch.nn import functional
from transformers import DataCollatorForLanguageModeling

from bert_packed.assembly import in_memory
from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.core.settings import InputError

ATTENTIONS = ("mask", "positions", "varlen")
IGNORED = -100  # label that neither torch nor `transformers` counts
NOTHING = -1  # in labels of `PerSequenceLoss`: no prediction here, and yet counted


class PackingCollator:
    """Collates the sequences that a sampler gives into as few packs as hold them, masks them, and says
    where they end.

        trainer = transformers.Trainer(model, arguments, train_dataset=dataset,
                                       data_collator=PackingCollator(tokenizer, max_seq_length=512))

    Takes dicts with `input_ids` of any length up to S, special tokens included; rows of `pack_dataset` are
    packed already. Returns a dict of tensors `[B, S]`: `input_ids`, `position_ids`, `labels` (-100 where
    nothing is predicted), and other columns with a value a token; and what the model's attention needs:

    - "mask": `attention_mask` `[B, 1, S, S]`, to be added to scores; for "eager" and "sdpa".
    - "positions": nothing. transformers, from version 5, finds the sequences by their `position_ids`. Models
      with local attention in some layers, such as ModernBERT, need it: a mask would be that of all layers.
    - "varlen": `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` of all packs one after
      another, for kernels of variable length; padding is a sequence there.
    """

    def __init__(
        self,
        tokenizer,
        max_seq_length,
        mlm_probability=0.3,
        *,
        causal=False,
        max_sequences_per_pack="max",
        attention="mask",
        per_sequence=False,
        dtype=torch.float32,
        seed=None,
    ):
        """Prepare.

        Args:
            tokenizer: Of transformers; its padding, mask and special tokens are used.
            max_seq_length, max_sequences_per_pack: S and K, as in `bert_packed.plan`.
            mlm_probability: Share of the tokens to predict, masked by the rule of
                `transformers.DataCollatorForLanguageModeling`; None predicts what a column `labels` says.
            causal: For causal models: `labels` are those of the column, or else the tokens themselves. The
                first of each sequence is left out: transformers would have its neighbour predict it.
            attention: "mask", "positions" or "varlen", as above.
            per_sequence: Give `labels` in the form that `PerSequenceLoss` needs, `[B, K, S]`.
            dtype: Of the mask; the model's.
            seed: Of the masking; None for torch's global generator.
        """
        if attention not in ATTENTIONS:
            raise InputError(f"`attention` must be one of {', '.join(ATTENTIONS)}. Received: {attention}.")
        if causal and per_sequence:
            raise InputError("`per_sequence` must be False for causal models. Received: True.")
        self.tokenizer, self.max_seq_length, self.causal = tokenizer, max_seq_length, causal
        self.max_sequences_per_pack, self.attention = max_sequences_per_pack, attention
        self.per_sequence, self.dtype = per_sequence, dtype
        self._masking = None
        if mlm_probability is not None and not causal:
            self._masking = DataCollatorForLanguageModeling(
                tokenizer, mlm_probability=mlm_probability, seed=seed
            )

    def __call__(self, examples):
        """Collate a list of dicts into a dict of tensors, as the class says."""
        packs = {name: torch.as_tensor(values) for name, values in self._packs(examples).items()}
        sequence_ids = packs.pop(in_memory.SEQUENCE_IDS)
        packs.pop(in_memory.SEQUENCE_INDEX, None)
        is_special = packs.pop("special_tokens_mask", None)
        if self._masking is not None:
            if is_special is None:
                special = torch.tensor(self.tokenizer.all_special_ids)
                is_special = torch.isin(packs[in_memory.TOKENS], special)
            is_special = is_special.bool() | (sequence_ids == 0)
            tokens, labels = self._masking.torch_mask_tokens(packs[in_memory.TOKENS], is_special)
            packs |= {in_memory.TOKENS: tokens, "labels": labels}
        elif self.causal:
            labels = packs.get("labels", packs[in_memory.TOKENS])
            packs["labels"] = labels.masked_fill(packs[in_memory.POSITION_IDS] == 0, IGNORED)
        if self.per_sequence:
            packs["labels"] = labels_by_sequence(packs["labels"], sequence_ids)
        return packs | self._attention_arguments(sequence_ids)

    def _packs(self, examples):
        columns = {name: [one[name] for one in examples] for name in examples[0]}
        if in_memory.SEQUENCE_IDS in columns:
            return {name: np.stack(values) for name, values in columns.items()}
        return in_memory.pack(
            columns,
            self.max_seq_length,
            self.max_sequences_per_pack,
            padding=_padding(columns, self.tokenizer.pad_token_id),
        )

    def _attention_arguments(self, sequence_ids):
        if self.attention == "positions":
            return {}
        if self.attention == "mask":
            return {"attention_mask": attention_mask(sequence_ids, self.dtype)}
        starts = torch.ones_like(sequence_ids, dtype=torch.bool)
        starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        ends = torch.cat([starts.flatten().nonzero()[:, 0], torch.tensor([sequence_ids.numel()])])
        offsets, longest = ends.to(torch.int32), int(ends.diff().max())
        lengths = {f"max_length_{side}": longest for side in "qk"}
        return {f"cu_seq_lens_{side}": offsets for side in "qk"} | lengths


def pack_dataset(dataset, max_seq_length, max_sequences_per_pack="max", *, pad_token_id=0, seed=0):
    """Pack a whole `datasets.Dataset` by one plan: another `Dataset`, a row a pack.

    Args:
        dataset: With `input_ids`, any further columns of one value a token or a sequence, and no others.
        max_seq_length, max_sequences_per_pack, seed: As in `bert_packed.pack`.
        pad_token_id: The tokenizer's.

    Returns:
        Rows for `PackingCollator`: the columns of `bert_packed.pack`.
    """
    columns = dataset[:]
    padding = _padding(columns, pad_token_id)
    packs = in_memory.pack(columns, max_seq_length, max_sequences_per_pack, seed=seed, padding=padding)
    return type(dataset).from_dict(packs)


def _padding(columns, pad_token_id):
    return {in_memory.TOKENS: pad_token_id or 0} | ({"labels": IGNORED} if "labels" in columns else {})


def labels_by_sequence(labels, sequence_ids):
    """Labels of each sequence by itself: int64 `[B, K, S]`.

        labels        [-100 7 -100 8 -100]   ->   [  -1    7   -1   -1   -1]
        sequence_ids  [   1 1    2 2    0]        [  -1   -1   -1    8   -1]

    -1 is no prediction, and -100 fills slots without a sequence. So what is not -100 are S numbers a
    sequence, by which `PerSequenceLoss` knows how many sequences all micro-batches of a step have.
    """
    slots_K = torch.arange(1, int(sequence_ids.max()) + 1, device=labels.device)
    is_own_BKS = sequence_ids[:, None] == slots_K[:, None]
    labels_BKS = torch.where(is_own_BKS & (labels != IGNORED)[:, None], labels[:, None], NOTHING)
    return labels_BKS.masked_fill(~is_own_BKS.any(-1, keepdim=True), IGNORED)


class PerSequenceLoss:
    """`compute_loss_func` of `transformers.Trainer`: each sequence counts as if it were alone in its pack.

    The mean over its predictions, then over the sequences of all micro-batches and devices of a step: Listing
    1 of "Packing: Towards 2x NLP BERT Acceleration". Sequences without predictions count as 0. Labels are
    those of `PackingCollator(per_sequence=True)`.
    """

    def __call__(self, outputs, labels, num_items_in_batch=None):
        """Loss of logits `[B, S, V]` of a micro-batch: float32 scalar.

        `num_items_in_batch` counts the labels of a step that are not -100; None where this is the step.
        """
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum()
        is_predicted_BKS = labels >= 0
        counts_BK1 = is_predicted_BKS.sum(-1, keepdim=True).clamp(min=1)
        weights_BS = (is_predicted_BKS / counts_BK1).sum(1)
        labels_BS = labels.clamp(min=NOTHING).max(1).values
        nll = functional.cross_entropy(
            outputs["logits"].flatten(0, 1).float(),
            labels_BS.flatten(),
            ignore_index=NOTHING,
            reduction="none",
        )
        return (nll * weights_BS.flatten()).sum() * labels.shape[-1] / num_items_in_batch
