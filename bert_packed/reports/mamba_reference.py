"""The same training by `MambaForCausalLM` of transformers on torch: what users of a CPU come from.

Rows are padded, for it takes no boundaries: a row of packs would leak. Its kernels are for GPUs; elsewhere it
loops over the tokens in Python ("slow path"). Which of the two ran is told by how often it multiplies.

Legend: B rows per batch, S row length.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.reports.torch_reference import (
    IGNORED_LABEL,
    TorchTraining,
    hugging_face_folder,
    import_torch,
    read_model,
)
from data_gen.cli.settings import InputError

SLOW_PATH, FAST_PATH = "slow: token by token in Python", "not token by token"
WATCHED_TOKENS = 16  # of each row: its backward pass grows with their square
LOSS_TOLERANCE = 1e-4  # float32 sums over a vocabulary, in another order


@dataclasses.dataclass(frozen=True)
class Reference:
    """Training with transformers.

    Attributes:
        train: Function that takes a step on all rows.
        num_tokens: Real tokens of them.
        padding: Share of padding, 0..1.
        path: Row of a table: which versions ran, `path`, and what it is known by: `watched tokens` of a row,
            `blocks`, and `bmm calls`, the products of batches in such a step, forward and backward.
    """

    train: Callable
    num_tokens: int
    padding: float
    path: dict


def causal_arguments_of(batch):
    """What `transformers.MambaForCausalLM` is called with for a batch of one sequence a row: dict of arrays.

    Cut behind the longest sequence: it needs no shape that is known before. It shifts the labels by itself.

        token_ids [[7 9 0 0]], sequence_ids [[1 1 0 0]]   ->   input_ids [[7 9]], labels [[7 9]]
    """
    is_token = batch["sequence_ids"] > 0
    longest = int(is_token.sum(axis=1).max())
    tokens = batch["token_ids"][:, :longest]
    return {"input_ids": tokens, "labels": np.where(is_token[:, :longest], tokens, IGNORED_LABEL)}


def causal_training(batch, model_config):
    """Training with transformers, after a check that it computes our loss from the same weights and rows.

    Args:
        batch: Batch dict of one sequence a row.
        model_config: `MambaConfig`.

    Returns:
        `Reference`.

    Raises:
        InputError: torch or transformers is missing, or computes another loss.
    """
    objective = next_token_objective("per_token")
    model = objective.build_model(model_config, seed=0)
    with hugging_face_folder(model) as folder:
        reference = read_model(folder, "MambaForCausalLM")
    training = TorchTraining(reference, learning_rate=1e-4, weight_decay=0.01, max_grad_norm=1.0)
    given = training.inputs(causal_arguments_of(batch))
    # Not compiled, once
    sums = objective.sums(model(batch, training=False), batch)
    ours = float(objective.loss(sums, objective.denominators(objective.counts(batch))))
    theirs = training.loss(given)
    if abs(ours - theirs) > LOSS_TOLERANCE * abs(theirs):
        raise InputError(f"`reference` must compute our loss, {ours}. Received: {theirs}.")
    num_tokens = int((batch["sequence_ids"] > 0).sum())
    padding = 1 - num_tokens / given["input_ids"].numel()
    few = {name: values[:, :WATCHED_TOKENS] for name, values in given.items()}
    path = _path(training, few, model_config.num_hidden_layers)
    return Reference(lambda _: training.step(given), num_tokens, padding, path)


def _path(training, given, num_blocks):
    """A step, watched. One that loops multiplies its states for every token of every block."""
    torch, transformers = import_torch()
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        num_products = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.num_products += function is torch.ops.aten.bmm.default
            return function(*args, **(kwargs or {}))

    with Watch() as watch:
        training.step(given)
    num_tokens, products = given["input_ids"].shape[1], watch.num_products
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "path": SLOW_PATH if products >= num_tokens * num_blocks else FAST_PATH,
        "watched tokens": num_tokens,
        "blocks": num_blocks,
        "bmm calls": products,
    }
