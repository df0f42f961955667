"""Packs for `transformers.Trainer` and any DataLoader: collation, whole data sets, the loss of sequences.

Legend: n sequences, B packs, S pack length, K sequences per pack, V vocabulary.
"""

import logging
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from bert_packed.assembly import in_memory
from bert_packed.assembly.given_columns import (
    POSITION_IDS,
    SEQUENCE_IDS,
    SEQUENCE_INDEX,
    TOKENS,
    read_packs,
    refuse,
)
from bert_packed.packing.arguments import check_choice, check_whole, is_number, iterate, shown
from bert_packed.packing.histogram import check_limits
from bert_packed.torch.exact_arguments import exact_arguments
from bert_packed.torch.labelled_rows import (
    IGNORED,
    KINDS,
    LABELS,
    find_labels,
    rows_of_packs,
    sequence_labels,
)
from bert_packed.torch.model_inputs import ATTENTIONS, ModelInputs

logger = logging.getLogger(__name__)

UNPREDICTED = -1  # in labels of `per_sequence_loss`: nothing to predict here, but counted
MLM_PROBABILITY = 0.3
MASK_RATE, RANDOM_RATE = 0.8, 0.1  # of the predictions, as in BERT; the others keep their token


class PackingCollator:
    """Data collator that packs the sequences of a batch, masks them and keeps them apart in attention.

        trainer = transformers.Trainer(
            model, arguments, train_dataset=dataset, data_collator=PackingCollator(tokenizer, 512)
        )

    Takes dicts with `input_ids` of up to S tokens, special ones included, and further columns of numbers; or
    rows of `pack_dataset`. Each call gives as few packs as possible, so B differs between batches.

    Returns a dict of tensors: int64 `[B, S]` `input_ids`, `position_ids` and `labels`, which are -100 where
    nothing is predicted; further columns, `[B, S]` with a value a token or `[B, K]` with one a sequence; and
    what the model's attention needs:

    - "mask": `attention_mask` `[B, 1, S, S]`, to be added to scores; for "eager" and "sdpa".
    - "positions": for causal models, whose sequences transformers finds by `position_ids`, and with a cache
      does not: `use_cache=False`.
    - "varlen": int32 `cu_seq_lens_q` and `cu_seq_lens_k`, `max_length_q` and `max_length_k`, of all packs one
      after another, for kernels of variable length such as "flash_attention_2". Padding is a sequence there.

    With `labels`, for models of `enable_packing`: padded rows `[n, L]`, a sequence each in the order of
    `examples`, with `attention_mask`, `labels`, `num_examples`, and `pack_index` `[B, S]`, cut at the fullest
    pack: where each token of the packs is among the rows, one after another; -1 is padding.
    """

    keeps_sequence_ids = False  # beside what a model takes, for `PackingTrainer`

    def __init__(
        self,
        tokenizer,
        max_seq_length,
        mlm_probability=MLM_PROBABILITY,
        *,
        labels=None,
        max_sequences_per_pack="max",
        model=None,
        attention=None,
        sliding_window=None,
        first_position=None,
        return_seq_idx=False,
        per_sequence=False,
        dtype=None,
        seed=None,
    ):
        """Prepare.

        Args:
            tokenizer: Tokenizer of transformers, whose padding, mask and special tokens are used.
            max_seq_length, max_sequences_per_pack: S and K, as in `bert_packed.plan`.
            mlm_probability: Share of tokens to predict, special ones apart: 80 % become the mask token, 10 %
                a random one. None or 0 is for causal models: labels are the tokens, or a column `labels`; the
                first of each sequence is -100, since the sequence before would have to predict it.
            labels: "sequence" for a column `labels` (or `label`) with a number a sequence, or a list of one
                for each of several labels; "token" for whole numbers, one a token. Nothing is masked, and of
                the arguments below only the first is used.
            model: Model that is trained, whose arguments of attention below are found, those that are given
                apart: it is audited on random tokens, forward and backward, and as in training, until it
                computes each sequence as alone. No reference is kept. None to give all of them by hand.
            attention: "mask", "positions" or "varlen", as above. None for what the model needs; "mask".
            sliding_window: `model.config.sliding_window` of a model with local attention in some layers, such
                as ModernBERT and GPT-OSS. Its `attention_mask` is a dict of two masks; with a single one all
                layers would see whole sequences. "varlen" needs no `sliding_window`.
            first_position: Position of a sequence's first token; `pad_token_id + 1` for RoBERTa. None for
                what the model needs; 0.
            return_seq_idx: True for int32 `seq_idx` `[B, S]`, the number of the token's sequence in its row
                from 0, which kernels of Mamba-2 take.
            per_sequence: True for `labels` as `per_sequence_loss` takes them, `[B, K, S]`.
            dtype: Dtype of the mask: the model's. None for that of `model`; float32.
            seed: Seed of masks. None draws new ones each time, from torch's generator. A number gives a
                sequence the same masks always, whatever its batch, pack, worker or rank: for evaluation.

        Raises:
            ValueError: an argument breaks its rule, or `model` is not exact under the given ones: the message
                says which are, or that none are. When called: a sequence or a row that is named does.
        """
        check_limits(max_seq_length, max_sequences_per_pack)
        is_tokenizer = hasattr(tokenizer, "pad_token_id")
        _require(is_tokenizer, "tokenizer", "be one of transformers", shown(tokenizer))
        mlm_probability = 0 if mlm_probability is None else mlm_probability
        is_rate = is_number(mlm_probability) and 0 <= mlm_probability <= 1
        _require(is_rate, "mlm_probability", "be a number from 0 to 1, or None", shown(mlm_probability))
        self.is_causal = mlm_probability == 0
        if labels is not None:
            check_choice("labels", labels, KINDS)
            options = (attention or "mask", sliding_window, first_position or 0, dtype or torch.float32, seed)
            is_default = options == ("mask", None, 0, torch.float32, None) and model is None
            is_default &= not (per_sequence or return_seq_idx) and mlm_probability in (MLM_PROBABILITY, 0)
            rule = "be None with other options than the limits of packs: `enable_packing` sets them"
            _require(is_default, "labels", rule, repr(labels))
            self.is_causal = True  # nothing is masked
        can_mask = self.is_causal or tokenizer.mask_token_id is not None
        rule = "have a mask token, unless mlm_probability=None"
        _require(can_mask, "tokenizer", rule, type(tokenizer).__name__)
        given = {"attention": attention, "sliding_window": sliding_window, "first_position": first_position}
        self._check_attention(**given, dtype=dtype)
        if seed is not None:
            check_whole("seed", seed)
        _require(not (per_sequence and self.is_causal), "per_sequence", "be False for causal models", True)
        self.tokenizer, self.mlm_probability, self.labels = tokenizer, mlm_probability, labels
        self.max_seq_length, self.max_sequences_per_pack = max_seq_length, max_sequences_per_pack
        self.per_sequence, self.seed = per_sequence, seed
        given |= {"return_seq_idx": return_seq_idx or None}
        if model is not None:
            is_known = hasattr(model, "config") and hasattr(model, "get_input_embeddings")
            _require(is_known, "model", "be one of transformers", shown(model))
            _require(dtype in (None, model.dtype), "dtype", f"be that of the model, {model.dtype}", dtype)
            found = exact_arguments(model, self.is_causal, **given)
            logger.info("%s is exact on packs with %s", type(model).__name__, found)
            self.model_inputs = found.inputs
        elif labels is None:
            given = {name: value for name, value in (given | {"dtype": dtype}).items() if value is not None}
            self.model_inputs = ModelInputs(is_causal=self.is_causal, **given)

    def _check_attention(self, attention, sliding_window, first_position, dtype):
        if attention is not None:
            check_choice("attention", attention, ATTENTIONS)
        # transformers makes masks of encoders without a look at positions: every token would see all
        is_isolated = attention != "positions" or self.is_causal
        _require(is_isolated, "attention", "be mask or varlen, unless mlm_probability=None", repr(attention))
        if sliding_window is not None:
            rule = 'be None, unless attention="mask"'
            _require(attention in (None, "mask"), "sliding_window", rule, shown(sliding_window))
            check_whole("sliding_window", sliding_window)
        is_floating = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        _require(is_floating, "dtype", "be a floating type of torch", shown(dtype))
        if first_position is not None:
            check_whole("first_position", first_position)

    def __call__(self, examples):
        """Collate a list of dicts into a dict of tensors, as the class says."""
        if self.labels:
            return self._collate_rows(read_examples(examples))
        packs = self._pack(read_examples(examples))
        packs = {name: torch.as_tensor(values) for name, values in packs.items()}
        sequence_ids = packs.pop(SEQUENCE_IDS)
        packs.pop(SEQUENCE_INDEX, None)
        is_padding = sequence_ids == 0
        tokens = packs[TOKENS].long().masked_fill(is_padding, self.tokenizer.pad_token_id or 0)
        is_special = packs.pop("special_tokens_mask", None)
        if self.is_causal:
            labels = packs.get(LABELS, tokens)
            if labels.shape != tokens.shape or labels.is_floating_point():
                received = f"{labels.dtype} {list(labels.shape)}"
                refuse("labels", "be whole numbers, one for each token", f"{received} of all packs")
            labels = labels.long().masked_fill(packs[POSITION_IDS] == 0, IGNORED)
        else:
            if is_special is None:
                is_special = torch.isin(tokens, torch.tensor(self.tokenizer.all_special_ids))
            tokens, labels = self._mask(tokens, sequence_ids, is_special.bool() | is_padding)
        packs[TOKENS], packs[LABELS] = tokens, labels.masked_fill(is_padding, IGNORED)
        if self.per_sequence:
            packs[LABELS] = labels_by_sequence(packs[LABELS], sequence_ids)
        inputs = self.model_inputs(packs | {SEQUENCE_IDS: sequence_ids})
        return inputs | {SEQUENCE_IDS: sequence_ids} if self.keeps_sequence_ids else inputs

    def _collate_rows(self, columns):
        num_examples, is_packed = len(columns[TOKENS]), POSITION_IDS in columns
        labels = find_labels(columns, self.labels, self.max_seq_length if is_packed else None)
        packs = self._pack(columns)
        packs.pop("special_tokens_mask", None)
        padding = {TOKENS: self.tokenizer.pad_token_id or 0, LABELS: IGNORED}
        batch = rows_of_packs(packs, padding)
        if labels is not None:
            batch = {LABELS: sequence_labels(labels, packs[SEQUENCE_IDS] if is_packed else None)} | batch
        batch = {name: torch.as_tensor(values) for name, values in batch.items()}
        return batch | {"num_examples": num_examples}

    def _pack(self, columns):
        if not self.is_causal and LABELS in columns:
            refuse("`examples`", "be without labels, which masking makes; or give labels=", "a column labels")
        if POSITION_IDS not in columns:
            return _pack_columns(columns, self.max_seq_length, self.max_sequences_per_pack)
        # Trainer removes what `model.forward` has no argument for
        if SEQUENCE_IDS not in columns:
            rule = f"have {SEQUENCE_IDS}; for Trainer remove_unused_columns=False"
            refuse("rows of `pack_dataset`", rule, ", ".join(columns))
        return read_packs(columns, self.max_seq_length)

    def _mask(self, tokens, sequence_ids, is_special):
        """Tokens with the predictions masked, and labels, both `[B, S]`."""
        choice, action, word = self._draw(tokens, sequence_ids).unbind(-1)
        is_predicted = (choice < self.mlm_probability) & ~is_special
        labels = tokens.masked_fill(~is_predicted, IGNORED)
        is_random = is_predicted & (action >= 1 - RANDOM_RATE)
        words = (word * len(self.tokenizer)).long()
        tokens = tokens.masked_fill(is_predicted & (action < MASK_RATE), self.tokenizer.mask_token_id)
        return torch.where(is_random, words, tokens), labels

    def _draw(self, tokens, sequence_ids):
        """Three random numbers in [0, 1) for each token: float64 `[B, S, 3]`."""
        if self.seed is None:
            return torch.rand(*tokens.shape, 3, dtype=torch.float64)
        draws = np.zeros((*tokens.shape, 3))
        for pack, row, ids in zip(draws, tokens.numpy(), sequence_ids.numpy(), strict=True):
            for number in range(1, ids.max() + 1):
                is_own = ids == number
                # Tokens alone decide, so that neighbours and the order of batches change nothing
                rng = np.random.default_rng([self.seed, zlib.crc32(row[is_own].tobytes())])
                pack[is_own] = rng.random((is_own.sum(), 3))
        return torch.from_numpy(draws)


def pack_dataset(dataset, max_seq_length, max_sequences_per_pack="max", *, labels=None, seed=0):
    """Pack a whole `datasets.Dataset` by one plan, in memory: another `Dataset`, with a row a pack.

    Args:
        dataset: `Dataset` with `input_ids`, as `PackingCollator` takes them, and further columns of numbers.
        max_seq_length, max_sequences_per_pack, seed: Arguments of `bert_packed.pack`.
        labels: "sequence" or "token" for a column `labels`, as in `PackingCollator`.

    Returns:
        Rows for `PackingCollator`: the columns of `bert_packed.pack`, padding 0, in labels -100.

    Raises:
        ValueError: an argument breaks its rule; the message names column and sequence.
    """
    if not isinstance(getattr(dataset, "column_names", None), list) or not hasattr(dataset, "from_dict"):
        refuse("`dataset`", "be a datasets.Dataset", type(dataset).__name__)
    columns = {name: dataset.with_format("numpy")[name][:] for name in dataset.column_names}
    packs = pack_rows(columns, max_seq_length, max_sequences_per_pack, labels, seed)
    return type(dataset).from_dict({name: list(values) for name, values in packs.items()})


def pack_rows(columns, max_seq_length, max_sequences_per_pack, labels, seed):
    """Columns of packs for `PackingCollator`; those of sequences are `pack_dataset`'s."""
    if labels is not None:
        check_choice("labels", labels, KINDS)
    found = find_labels(columns, labels) if labels else None
    packs = _pack_columns(columns, max_seq_length, max_sequences_per_pack, seed=seed)
    if found is not None:
        found = sequence_labels(found)
        packs[LABELS] = [found[row[row >= 0]].tolist() for row in packs[SEQUENCE_INDEX]]
    return packs


def _pack_columns(columns, *limits, seed=0):
    padding = {LABELS: IGNORED} if LABELS in columns else {}
    return in_memory.pack(columns, *limits, seed=seed, padding=padding)


def labels_by_sequence(labels, sequence_ids):
    """Labels of each sequence by itself, for `per_sequence_loss`: int64 `[B, K, S]` of two `[B, S]`.

        labels        [-100 7 -100 8 -100]   ->   [-1  7 -1 -1 -1]
        sequence_ids  [   1 1    2 2    0]        [-1 -1 -1  8 -1]

    -1 is no prediction, and -100 fills slots without a sequence.
    """
    # Trainer counts labels other than -100: here S for each sequence
    slots_K = torch.arange(1, int(sequence_ids.max()) + 1, device=labels.device)
    is_own_BKS = sequence_ids[:, None] == slots_K[:, None]
    labels_BKS = torch.where(is_own_BKS & (labels != IGNORED)[:, None], labels[:, None], UNPREDICTED)
    return labels_BKS.masked_fill(~is_own_BKS.any(-1, keepdim=True), IGNORED)


def per_sequence_loss(outputs, labels, num_items_in_batch=None):
    """Loss in which each sequence weighs alike: `compute_loss_func` of `transformers.Trainer`.

    Each sequence's loss is the mean over its predictions, 0 where it has none. The step's is the mean over
    the sequences of all its micro-batches and devices: Listing 1 of "Packing: Towards 2x NLP BERT
    Acceleration".

    Args:
        outputs: Outputs of the model, with `logits` `[B, S, V]`, of a micro-batch.
        labels: int64 `[B, K, S]` of `PackingCollator(per_sequence=True)`.
        num_items_in_batch: Labels of the step that are not -100; None where the micro-batch is the step.

    Returns:
        float32 scalar; its sum over the micro-batches is the step's.
    """
    if num_items_in_batch is None:
        num_items_in_batch = (labels != IGNORED).sum()
    is_predicted_BKS = labels >= 0
    counts_BK1 = is_predicted_BKS.sum(-1, keepdim=True).clamp(min=1)
    weights_BS = (is_predicted_BKS / counts_BK1).sum(1)
    labels_BS = labels.clamp(min=UNPREDICTED).amax(1)
    nll = functional.cross_entropy(
        outputs["logits"].flatten(0, 1).float(),
        labels_BS.flatten(),
        ignore_index=UNPREDICTED,
        reduction="none",
    )
    return (nll * weights_BS.flatten()).sum() * labels.shape[-1] / num_items_in_batch


def _require(holds, name, rule, received):
    if not holds:
        refuse(f"`{name}`", rule, received)


def read_examples(examples):
    """Columns of dicts that have the same ones."""
    examples = list(iterate(examples, "`examples`", "be a list of dicts"))
    if not examples:
        refuse("`examples`", "hold one sequence or more", "none")
    for number, one in enumerate(examples):
        if not isinstance(one, Mapping) or TOKENS not in one:
            received = ", ".join(map(str, one)) if isinstance(one, Mapping) else shown(one)
            refuse(f"sequence {number}", f"be a dict with {TOKENS}", received)
        if one.keys() != examples[0].keys():
            rule = f"have the columns {', '.join(map(str, examples[0]))}"
            refuse(f"sequence {number}", rule, ", ".join(map(str, one)))
    return {name: [one[name] for one in examples] for name in examples[0]}
