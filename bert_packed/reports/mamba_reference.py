"""The same training by `MambaForCausalLM` of transformers on torch: what users of a CPU come from.

Rows are padded, for it takes no boundaries: a row of packs would leak. Its kernels are for GPUs; elsewhere it
loops over the tokens in Python ("slow path").

Legend: B rows per batch, S row length.
"""

import dataclasses

import numpy as np

from bert_packed.objectives.next_tokens import next_token_objective
from bert_packed.reports.torch_reference import IGNORED_LABEL, TorchTraining, copy_model
from data_gen.cli.settings import InputError

LOSS_TOLERANCE = 1e-4  # float32 sums over a vocabulary, in another order


@dataclasses.dataclass(frozen=True)
class Rows:
    """What transformers trains on.

    Attributes:
        inputs: List of dicts of arrays, arguments of the model.
        padding: Share of padding, 0..1.
    """

    inputs: list[dict]
    padding: float


def causal_arguments_of(batch):
    """What `transformers.MambaForCausalLM` is called with for a batch of one sequence a row: dict of arrays.

    Cut behind the longest sequence: it needs no shape that is known before. It shifts the labels by itself.

        token_ids [[7 9 0 0]], sequence_ids [[1 1 0 0]]   ->   input_ids [[7 9]], labels [[7 9]]
    """
    is_token = batch["sequence_ids"] > 0
    longest = int(is_token.sum(axis=1).max())
    tokens = batch["token_ids"][:, :longest]
    return {"input_ids": tokens, "labels": np.where(is_token[:, :longest], tokens, IGNORED_LABEL)}


def causal_training(batches, model_config):
    """Training with transformers, after a check that it computes our loss from the same weights and rows.

    Args:
        batches: List of batch dicts of one sequence a row.
        model_config: `MambaConfig`.

    Returns:
        `Rows`, and a function that trains once on all of them.

    Raises:
        InputError: torch or transformers is missing, or computes another loss.
    """
    objective = next_token_objective("per_token")
    model = objective.build_model(model_config, seed=0)
    reference = copy_model(model, "MambaForCausalLM")
    training = TorchTraining(
        reference, learning_rate=1e-4, weight_decay=0.01, max_grad_norm=1.0, arguments=causal_arguments_of
    )
    inputs = [training.inputs(batch) for batch in batches]
    # Of the fewest tokens: nothing here is compiled
    batch, given = min(zip(batches, inputs, strict=True), key=lambda pair: pair[1]["input_ids"].numel())
    sums = objective.sums(model(batch, training=False), batch)
    ours = float(objective.loss(sums, objective.denominators(objective.counts(batch))))
    theirs = training.loss(given)
    if abs(ours - theirs) > LOSS_TOLERANCE * abs(theirs):
        raise InputError(f"`reference` must compute our loss, {ours}. Received: {theirs}.")

    def train(_):
        for given in inputs:
            training.step(given)

    num_tokens = sum(int((batch["sequence_ids"] > 0).sum()) for batch in batches)
    size = sum(given["input_ids"].numel() for given in inputs)
    return Rows(inputs, 1 - num_tokens / size), train
