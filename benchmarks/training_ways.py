"""The ways to take a training step that benchmarks compare: a plain BERT, ours, `transformers`, KerasHub."""

import contextlib
import dataclasses
import functools

from benchmarks import torch_reference
from benchmarks.peer_process import PeerProcess
from bert_packed.core.settings import InputError
from bert_packed.training.engines import make_engine

LOSS_TOLERANCE = 1e-4  # float32 sums over a vocabulary, in another order
GELU_TOLERANCE = 1e-3  # two forms of GELU
ADAMW = {"learning_rate": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0}  # of the peers


def our_engines(model_config, micro_batch_size):
    """Engines by name: `plain`, a BERT that knows nothing of packs, and ours for `packed` and `unpacked`.

    Args:
        model_config: `ModelConfig`.
        micro_batch_size: As of the engines.
    """
    from benchmarks import plain_bert
    from benchmarks.benchmark_engine import RECIPE, build_engine
    from bert_packed.training.optimization import build_optimizer

    objective = plain_bert.plain_objective()
    plain = make_engine(
        objective.build_model(model_config), objective, build_optimizer(RECIPE), micro_batch_size
    )
    packed, unpacked = (build_engine(model_config, micro_batch_size=micro_batch_size) for _ in range(2))
    return {"plain": plain, "packed": packed, "unpacked": unpacked}


def way(engine, batches):
    """A function of the number of the repeat: a step on one of these batches, until the device is done."""

    def step(repeat):
        batch = batches[repeat % len(batches)]
        float(engine.train_step(batch)["num_sequences"])  # wait for the device

    return step


@contextlib.contextmanager
def torch_ways(model_config, rows, keeps_memory=False):
    """Steps of one model of transformers on torch, while the block runs; it is checked to compute our loss.

    Args:
        model_config: `ModelConfig`.
        rows: Dict from name to a list of batch dicts at depth 1, whose rows may be of other lengths in each.
        keeps_memory: As of the `PeerProcess` that takes the steps.

    Yields:
        Dict from name to a function of the number of the repeat.

    Raises:
        InputError: of the first batch it computes another loss from the same weights.
    """
    with contextlib.ExitStack() as stack:
        peer = _start_torch(stack, model_config, rows, keeps_memory)
        yield {name: functools.partial(peer.call, "step", name) for name in rows}


def _start_torch(stack, model_config, rows, keeps_memory):
    """The process of `torch_ways`, until the stack ends; nothing else of it stays in memory here."""
    from bert_packed.objectives.pretraining import pretraining_objective

    objective = pretraining_objective("per_token")
    model = objective.build_model(model_config, seed=0)
    given = {name: [*map(torch_reference.arguments_of, batches)] for name, batches in rows.items()}
    with torch_reference.hugging_face_folder(model) as folder:
        arguments = folder, "BertForPreTraining", ADAMW, given
        peer = PeerProcess(torch_reference.TorchSteps, *arguments, keeps_memory=keeps_memory)
        stack.enter_context(peer)
    name, batches = next(iter(rows.items()))
    check_loss("torch", objective, model, batches[0], peer.call("loss", name))
    return peer


def keras_hub_ways(model_config, rows):
    """Steps of KerasHub's model on the running backend, in this process, with its kept memory.

    Otherwise as `torch_ways`. Every row length is another program: give rows of one.
    """
    from benchmarks.keras_hub_reference import KerasHubTraining, copy_model
    from bert_packed.objectives.pretraining import masked_lm_objective
    from bert_packed.training.engines.variables import named_weights

    objective = masked_lm_objective("per_token")
    # GELU in the form of its blocks; its head has the other one
    model = objective.build_model(dataclasses.replace(model_config, hidden_act="gelu_new"), seed=0)
    training = KerasHubTraining(copy_model(model_config, named_weights(model)), **ADAMW)
    batches = next(iter(rows.values()))
    check_loss("keras-hub", objective, model, batches[0], training.loss(batches[0]), GELU_TOLERANCE)
    return {name: _keras_hub_way(training, some) for name, some in rows.items()}


def _keras_hub_way(training, batches):
    return lambda repeat: training.step(batches[repeat % len(batches)])


def check_loss(peer, objective, model, batch, theirs, tolerance=LOSS_TOLERANCE):
    """Raise `InputError` where a peer computes another loss than we do.

    Args:
        peer: Its name.
        objective, model: Ours, with the same weights; computed here once, not compiled.
        batch: Batch dict that both are given.
        theirs: Its loss.
        tolerance: Of the loss.
    """
    sums = objective.sums(model(batch, training=False), batch)
    ours = float(objective.loss(sums, objective.denominators(objective.counts(batch))))
    if not abs(ours - theirs) <= tolerance * abs(theirs):
        raise InputError(f"`reference`, {peer}, must compute our loss, {ours}. Received: {theirs}.")
