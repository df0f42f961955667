"""The same training step and the same vectors by `transformers` on torch: what users come from.

Everything as a user of `transformers` would have it: rows padded to one length, its own attention and losses,
the fused AdamW. torch and transformers come with the extra `reference`. No Keras is imported to compute: a
`PeerProcess` holds torch alone.

Legend: B rows per batch, S row length, n texts, D model width.
"""

import contextlib
import tempfile

import numpy as np

from bert_packed.core.settings import InputError
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
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(num_cores())
    return torch, transformers


@contextlib.contextmanager
def hugging_face_folder(model):
    """A folder that `transformers` reads our model from, while the block runs."""
    from bert_packed.checkpoints.export_formats import write_hugging_face
    from bert_packed.training.engines.variables import named_weights

    with tempfile.TemporaryDirectory() as folder:
        write_hugging_face(folder, model, named_weights(model))
        yield folder


def read_model(folder, name):
    """A model of `transformers`, of the class of this name."""
    _, transformers = import_torch()
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
    """

    def __init__(self, folder, max_seq_length, batch_size):
        self._torch, transformers = import_torch()
        self._model = transformers.BertModel.from_pretrained(folder).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._arguments = {"max_length": max_seq_length, "truncation": True}
        self._batch_size = batch_size

    def encode(self, texts, padding, sorts=False):
        """float32 `[n, D]`, means over each text's tokens.

        Args:
            texts: List of str.
            padding: "max_length" for rows of S tokens, "longest" for as many as the batch's longest text has.
            sorts: Whether texts of like length share a batch, the longest first: by characters, as
                sentence-transformers does.
        """
        if sorts:
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
    """The order in which `TorchEncoder` computes texts that it sorts: int64 `[n]`, by characters."""
    return np.argsort([-len(text) for text in texts], kind="stable")


class TorchTraining:
    """Training steps of a model of `transformers`.

    Args:
        model: From `read_model`.
        learning_rate, weight_decay, max_grad_norm: Of AdamW and of the clipping.
    """

    def __init__(self, model, learning_rate, weight_decay, max_grad_norm):
        self._torch, _ = import_torch()
        self.model = model.train()
        self._max_grad_norm = max_grad_norm
        self._optimizer = self._torch.optim.AdamW(
            model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
        )

    def inputs(self, arguments):
        """Arguments of the model, a dict of arrays, as int64 tensors."""
        return {name: self._torch.tensor(values).long() for name, values in arguments.items()}

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


class TorchSteps:
    """`TorchTraining` of a model in a folder, on batches that it holds.

    Args:
        folder: Hugging Face folder.
        name: Class of the model.
        recipe: Dict of `TorchTraining`'s arguments after the model.
        batches: Dict from name to a list of the model's arguments, dicts of arrays.
    """

    def __init__(self, folder, name, recipe, batches):
        self._training = TorchTraining(read_model(folder, name), **recipe)
        self._batches = {name: [*map(self._training.inputs, some)] for name, some in batches.items()}

    def loss(self, name):
        """The loss of the first batch of a name, without dropout."""
        return self._training.loss(self._batches[name][0])

    def step(self, name, repeat):
        """A step on the batch of a name whose turn it is; returns its loss."""
        batches = self._batches[name]
        return self._training.step(batches[repeat % len(batches)])

    def count_products(self, name, num_tokens):
        """How often a step on the first tokens of each row multiplies batches of matrices (`bmm`).

        Forward and backward, of the first batch of a name, whose arguments must all be `[B, S]` or wider.
        """
        torch, _ = import_torch()
        from torch.utils._python_dispatch import TorchDispatchMode

        class Watch(TorchDispatchMode):
            num_products = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                self.num_products += function is torch.ops.aten.bmm.default
                return function(*args, **(kwargs or {}))

        few = {key: values[:, :num_tokens] for key, values in self._batches[name][0].items()}
        with Watch() as watch:
            self._training.step(few)
        return watch.num_products
