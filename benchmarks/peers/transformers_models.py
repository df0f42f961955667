"""Training steps and vectors of texts by transformers on torch, as its users have them.

Rows padded to one length, its own attention and losses, fused AdamW. torch and transformers come with the
extra `reference`. Nothing here imports Keras: a `PeerProcess` holds torch alone.

Legend: B rows per batch, S row length, n texts, D model width.
"""

import numpy as np

from bert_packed.architectures.registry import MASKED_LM, PRETRAINING
from bert_packed.core.settings import InputError
from bert_packed.schema import CAUSAL_LM
from data_gen.jobs.runners import num_cores

IGNORED_LABEL = -100  # no loss is computed there


def import_torch():
    """Import torch, on all cores, and transformers; raises `InputError` where they are missing."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"`reference` needs torch and transformers: pip install -e '.[reference]'. Received: {error}."
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(num_cores())
    return torch, transformers


def bert_arguments(batch):
    """Arguments of `BertForPreTraining` for a batch dict of one sequence a row: dict of arrays.

    prediction_positions [[1 3 0]], prediction_sequences [[1 1 0]], prediction_ids [[7 9 0]]
    ->   labels [[-100 7 -100 9]]
    """
    labels = np.full(batch["token_ids"].shape, IGNORED_LABEL)
    rows, columns = np.nonzero(batch["prediction_sequences"])
    labels[rows, batch["prediction_positions"][rows, columns]] = batch["prediction_ids"][rows, columns]
    return {
        "input_ids": batch["token_ids"],
        "attention_mask": batch["sequence_ids"],
        "token_type_ids": batch["token_type_ids"],
        "labels": labels,
        "next_sentence_label": batch["nsp_labels"][:, 0],
    }


def masked_lm_arguments(batch):
    """Arguments of a masked LM for a batch dict of one sequence a row: dict of arrays, cut as below."""
    arguments = bert_arguments(batch)
    longest = int((batch["sequence_ids"] > 0).sum(axis=1).max())
    return {name: arguments[name][:, :longest] for name in ("input_ids", "attention_mask", "labels")}


def mamba_arguments(batch):
    """Arguments of `MambaForCausalLM` for a batch dict of one sequence a row: dict of arrays.

    Cut behind the longest sequence. It shifts the labels itself.

        token_ids [[7 9 0 0]], sequence_ids [[1 1 0 0]]   ->   input_ids [[7 9]], labels [[7 9]]
    """
    is_token = batch["sequence_ids"] > 0
    longest = int(is_token.sum(axis=1).max())
    tokens = batch["token_ids"][:, :longest]
    return {"input_ids": tokens, "labels": np.where(is_token[:, :longest], tokens, IGNORED_LABEL)}


ARGUMENTS = {PRETRAINING: bert_arguments, MASKED_LM: masked_lm_arguments, CAUSAL_LM: mamba_arguments}


def find_device(torch):
    """The device that torch computes on: "cuda" where there is one, or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_update(torch, model, learning_rate, weight_decay, max_grad_norm):
    """A function that steps by AdamW with clipping on the loss of a function, and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True)

    def update(compute_loss):
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        return loss.item()

    return update


class Training:
    """Training steps of a class of model from its folder, on batches that it holds.

    It computes on a GPU where there is one. `batches` is a dict from name to a list of the model's arguments,
    `recipe` has the arguments of `make_update`. With `is_mixed` steps compute in bfloat16 from float32
    weights (autocast).
    """

    def __init__(self, folder, name, batches, recipe, is_mixed=False):
        self._torch, transformers = import_torch()
        self._device = find_device(self._torch)
        self._model = getattr(transformers, name).from_pretrained(folder).to(self._device).train()
        self._is_mixed = is_mixed
        self._update = make_update(self._torch, self._model, **recipe)
        self._batches = {name: [self._tensors(one) for one in some] for name, some in batches.items()}

    def loss(self, name):
        """Loss of the first batch of a name in float32, without dropout."""
        self._model.eval()
        with self._torch.inference_mode():
            value = self._model(**self._batches[name][0]).loss.item()
        self._model.train()
        return value

    def step(self, name, repeat):
        """Step on one of the batches of a name, the next with each repeat; returns its loss."""
        inputs = self._batches[name][repeat % len(self._batches[name])]

        def compute_loss():
            with self._torch.autocast(self._device, self._torch.bfloat16, enabled=self._is_mixed):
                return self._model(**inputs).loss

        return self._update(compute_loss)

    def _tensors(self, arguments):
        return {
            name: self._torch.tensor(values, dtype=self._torch.long, device=self._device)
            for name, values in arguments.items()
        }


class Encoder:
    """Mean vectors of texts by `BertModel`, with the tokenizer of its folder, on padded batches."""

    def __init__(self, folder, max_seq_length, batch_size):
        self._torch, transformers = import_torch()
        self._model = transformers.BertModel.from_pretrained(folder).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._arguments = {"max_length": max_seq_length, "truncation": True}
        self._batch_size = batch_size

    def encode(self, texts, padding, sorts=False):
        """Means over each text's tokens: float32 `[n, D]`; `padding` is "max_length" or "longest"."""
        if sorts:  # by characters, the longest first, as sentence-transformers does
            order = longest_first(texts)
            vectors = self.encode([texts[index] for index in order], padding)
            return vectors[np.argsort(order)]
        vectors = []
        with self._torch.inference_mode():
            for first in range(0, len(texts), self._batch_size):
                some = texts[first : first + self._batch_size]
                inputs = self._tokenizer(some, return_tensors="pt", padding=padding, **self._arguments)
                hidden_BSD = self._model(**inputs).last_hidden_state
                mask_BS1 = inputs["attention_mask"][:, :, None].to(hidden_BSD.dtype)
                vectors.append(((hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1)).numpy())
        return np.concatenate(vectors)


def longest_first(texts):
    """The order of sorted texts, by characters: int64 `[n]`."""
    return np.argsort([-len(text) for text in texts], kind="stable")
