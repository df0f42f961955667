"""Training by peers from our weights, each checked to compute our loss before it is timed."""

import contextlib
import dataclasses
import tempfile

from benchmarks.peers import transformers_models
from benchmarks.peers.process import PeerProcess
from bert_packed.core.settings import InputError

LOSS_TOLERANCE = 1e-4  # float32 sums over a vocabulary, in another order
GELU_TOLERANCE = 1e-3  # two forms of GELU
ADAMW = {"learning_rate": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0}


@contextlib.contextmanager
def transformers_training(model_config, rows, keeps_memory=False):
    """A model of transformers in another process, while the block runs.

        with transformers_training(config, {"padded": batches}) as peer:
            peer.call("step", "padded", repeat)

    `rows` is a dict from name to a list of batch dicts at depth 1; each may have another row length. Raises
    `InputError` where torch or transformers is missing, or computes another loss for the first batch.
    """
    with contextlib.ExitStack() as stack:
        yield _start(stack, model_config, rows, keeps_memory)


def _start(stack, model_config, rows, keeps_memory):
    """The process of `transformers_training`; our model is freed when this returns."""
    from bert_packed.checkpoints.export_formats import write_hugging_face
    from bert_packed.config import MambaConfig
    from bert_packed.objectives.next_tokens import next_token_objective
    from bert_packed.objectives.pretraining import pretraining_objective
    from bert_packed.training.engines.engine import named_weights

    if isinstance(model_config, MambaConfig):
        name, arguments_of = "MambaForCausalLM", transformers_models.mamba_arguments
        objective = next_token_objective("per_token")
    else:
        name, arguments_of = "BertForPreTraining", transformers_models.bert_arguments
        objective = pretraining_objective("per_token")
    model = objective.build_model(model_config, seed=0)
    given = {key: [*map(arguments_of, batches)] for key, batches in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_hugging_face(folder, model, named_weights(model))
        arguments = folder, name, given, *ADAMW.values()
        make = transformers_models.Training
        peer = stack.enter_context(PeerProcess(make, *arguments, keeps_memory=keeps_memory))
    key, batches = next(iter(rows.items()))
    check_loss("torch", objective, model, batches[0], peer.call("loss", key))
    return peer


def keras_hub_training(model_config, batch):
    """KerasHub's model on the running backend, in this process, checked on a batch dict at depth 1."""
    from benchmarks.peers import keras_hub_model
    from bert_packed.objectives.pretraining import masked_lm_objective
    from bert_packed.training.engines.engine import named_weights

    objective = masked_lm_objective("per_token")
    # GELU in the form of its blocks; its head has the other one, so the losses differ a little
    model = objective.build_model(dataclasses.replace(model_config, hidden_act="gelu_new"), seed=0)
    copy = keras_hub_model.copy_model(model_config, named_weights(model))
    training = keras_hub_model.Training(copy, **ADAMW)
    check_loss("keras-hub", objective, model, batch, training.loss(batch), GELU_TOLERANCE)
    return training


def check_loss(peer, objective, model, batch, theirs, tolerance=LOSS_TOLERANCE):
    """Raise `InputError` where a peer computes another loss than we do for a batch dict, not compiled."""
    sums = objective.sums(model(batch, training=False), batch)
    ours = float(objective.loss(sums, objective.denominators(objective.counts(batch))))
    if not abs(ours - theirs) <= tolerance * abs(theirs):
        raise InputError(f"`reference`, {peer}, must compute our loss, {ours}. Received: {theirs}.")
