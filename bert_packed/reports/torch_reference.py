"""The same training step and the same vectors by `transformers` on torch: what users come from.

Everything as a user of `transformers` would have it: rows padded to one length, its own attention and losses,
the fused AdamW. torch and transformers come with the extra `reference`.

Legend: B rows per batch, S row length, n texts, D model width.
"""

import tempfile

import numpy as np

from bert_packed.checkpoints.export_formats import write_hugging_face
from bert_packed.training.engines.variables import named_weights
from data_gen.cli.settings import InputError
from data_gen.jobs.runners import num_cores

IGNORED_LABEL = -100  # where transformers computes no loss


def import_torch():
    """torch on all cores, and transformers; raises `InputError` where they are missing."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"`reference` needs torch and transformers: pip install -e '.[reference]'. Received: {error}."
        ) from error
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(num_cores())
    return torch, transformers


def copy_model(model, name="BertForPreTraining"):
    """A model of `transformers`, of the class of this name, with our weights, through a folder on disk."""
    _, transformers = import_torch()
    with tempfile.TemporaryDirectory() as folder:
        write_hugging_face(folder, model, named_weights(model))
        return getattr(transformers, name).from_pretrained(folder)


def arguments_of(batch):
    """What `transformers.BertForPreTraining` is called with for a batch dict at depth 1: dict of arrays.

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


class TorchEncoder:
    """Mean vectors of texts by `transformers.BertModel`, on padded batches.

    Args:
        folder: Hugging Face folder with model and tokenizer.
        max_seq_length: S; longer texts are cut.
        batch_size: B.
        padding: "max_length" for rows of S tokens, "longest" for rows as long as the batch's longest text.
    """

    def __init__(self, folder, max_seq_length, batch_size, padding):
        self._torch, transformers = import_torch()
        self._model = transformers.BertModel.from_pretrained(folder).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._arguments = {"max_length": max_seq_length, "truncation": True, "padding": padding}
        self._batch_size = batch_size

    def encode(self, texts, sorts=False):
        """float32 `[n, D]`, means over each text's tokens.

        Args:
            texts: List of str.
            sorts: Whether texts of like length share a batch, the longest first: by characters, as
                sentence-transformers does.
        """
        if sorts:
            order = longest_first(texts)
            vectors = self.encode([texts[index] for index in order])
            return vectors[np.argsort(order)]
        vectors = []
        with self._torch.inference_mode():
            for first in range(0, len(texts), self._batch_size):
                some = texts[first : first + self._batch_size]
                inputs = self._tokenizer(some, return_tensors="pt", **self._arguments)
                hidden_BSD = self._model(**inputs).last_hidden_state
                mask_BS1 = inputs["attention_mask"][:, :, None].to(hidden_BSD.dtype)
                vectors.append(((hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1)).numpy())
        return np.concatenate(vectors)


def longest_first(texts):
    """The order in which `TorchEncoder` computes texts that it sorts: int64 `[n]`, by characters."""
    return np.argsort([-len(text) for text in texts], kind="stable")


class TorchTraining:
    """Training steps of a model of `transformers`.

    Args:
        model: From `copy_model`.
        learning_rate, weight_decay, max_grad_norm: Of AdamW and of the clipping.
        arguments: Function from a batch dict to the model's arguments, a dict of arrays.
    """

    def __init__(self, model, learning_rate, weight_decay, max_grad_norm, arguments=arguments_of):
        self._torch, _ = import_torch()
        self.model = model.train()
        self._max_grad_norm = max_grad_norm
        self._arguments = arguments
        self._optimizer = self._torch.optim.AdamW(
            model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
        )

    def inputs(self, batch):
        """Arguments of the model from a batch dict at depth 1: dict of int64 tensors."""
        return {name: self._torch.tensor(values).long() for name, values in self._arguments(batch).items()}

    def loss(self, inputs):
        """The loss before the first step, without dropout."""
        self.model.eval()
        with self._torch.inference_mode():
            value = self.model(**inputs).loss.item()
        self.model.train()
        return value

    def step(self, inputs):
        """One optimizer step; returns its loss."""
        self._optimizer.zero_grad()
        loss = self.model(**inputs).loss
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        return loss.item()
