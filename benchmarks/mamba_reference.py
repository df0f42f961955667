"""The same training by `MambaForCausalLM` of transformers on torch: what users of a CPU come from.

Rows are padded, for it takes no boundaries: a row of packs would leak. Its kernels are for GPUs; elsewhere it
loops over the tokens in Python ("slow path"). Which of the two ran is told by how often it multiplies.

Legend: B rows per batch, S row length.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from benchmarks import training_ways
from benchmarks.peer_process import PeerProcess
from benchmarks.torch_reference import IGNORED_LABEL, TorchSteps, hugging_face_folder
from bert_packed.core.versions import versions
from bert_packed.objectives.next_tokens import next_token_objective

SLOW_PATH, FAST_PATH = "slow: token by token in Python", "not token by token"
WATCHED_TOKENS = 16  # of each row: its backward pass grows with their square
ROWS = "rows"


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


@contextlib.contextmanager
def causal_training(batch, model_config):
    """Training with transformers in a process of its own, while the block runs.

    It is checked to compute our loss from the same weights and rows.

    Args:
        batch: Batch dict of one sequence a row.
        model_config: `MambaConfig`.

    Yields:
        `Reference`.

    Raises:
        InputError: torch or transformers is missing, or computes another loss.
    """
    objective = next_token_objective("per_token")
    model = objective.build_model(model_config, seed=0)
    given = causal_arguments_of(batch)
    with contextlib.ExitStack() as stack:
        with hugging_face_folder(model) as folder:
            arguments = folder, "MambaForCausalLM", training_ways.ADAMW, {ROWS: [given]}
            peer = stack.enter_context(PeerProcess(TorchSteps, *arguments))
        training_ways.check_loss("torch", objective, model, batch, peer.call("loss", ROWS))
        del model
        num_rows, length = given["input_ids"].shape
        num_tokens = int((batch["sequence_ids"] > 0).sum())
        watched = min(length, WATCHED_TOKENS)
        num_products = peer.call("count_products", ROWS, watched)
        yield Reference(
            train=functools.partial(peer.call, "step", ROWS),
            num_tokens=num_tokens,
            padding=1 - num_tokens / (num_rows * length),
            path=path_row(watched, model_config.num_hidden_layers, num_products),
        )


def path_row(num_tokens, num_blocks, num_products):
    """`Reference.path`: a step that loops over the tokens of a row multiplies for each, in every block."""
    found = versions(("transformers", "torch"))
    return {
        "transformers": found["transformers"],
        "torch": found["torch"],
        "path": SLOW_PATH if num_products >= num_tokens * num_blocks else FAST_PATH,
        "watched tokens": num_tokens,
        "blocks": num_blocks,
        "bmm calls": num_products,
    }
