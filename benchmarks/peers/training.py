"""Training by peers from our weights, each checked to compute our loss before it is timed."""

import contextlib
import tempfile

import numpy as np

from benchmarks.peers import transformers_models
from benchmarks.peers.process import PeerProcess
from benchmarks.training_steps import ADAMW, first_head, objective_of
from bert_packed.architectures.registry import family_of
from bert_packed.core.settings import InputError

LOSS_TOLERANCE = 1e-4  # float32 sums over a vocabulary, in another order
TOKENS_AT_ONCE = 128  # of FlexAttention's blocks
TOKEN_FEATURES = ("token_ids", "token_type_ids", "position_ids")


def transformers_training(model_config, rows, **options):
    """A model of transformers in another process: a context manager.

        with transformers_training(config, {"padded": batches}) as peer:
            peer.call("step", "padded", repeat)

    `rows` is a dict from name to a list of batch dicts at depth 1; each may have another row length; options
    are those of `_checked_peer`. Raises `InputError` where torch or transformers is missing, or computes
    another loss for the first batch.
    """
    head = first_head(model_config)
    name = family_of(model_config).load_names().classes[head]
    arguments_of = transformers_models.ARGUMENTS[head]
    given = {key: [arguments_of(batch) for batch in batches] for key, batches in rows.items()}
    key, (first, *_) = next(iter(rows.items()))
    make = transformers_models.Training
    return _checked_peer(model_config, first, [key], make, (name, given), **options)


def padding_free_training(model_config, batches, attention, **options):
    """`padding_free.Training` on the sequences of batch dicts of a BERT, in another process, as above.

    with padding_free_training(config, batches, "flex") as peer:
        peer.call("step", repeat)
    """
    # A CPU takes sequences one by one, where a filled-up batch would only be slower
    given = without_padding(batches, 1 if attention == "one by one" else TOKENS_AT_ONCE)
    arguments = model_config, given, attention
    return _checked_peer(model_config, batches[0], [], _make_padding_free, arguments, **options)


def _make_padding_free(*arguments):
    from benchmarks.peers import padding_free  # torch, which is not for this process

    return padding_free.Training(*arguments)


@contextlib.contextmanager
def _checked_peer(
    model_config, batch, key, make, arguments, keeps_memory=False, is_mixed=False, seconds=None
):
    """A peer from our weights, checked on a batch; our model is freed before the block runs.

    Steps compute in bfloat16 with `is_mixed`; `keeps_memory` and `seconds` are as in `PeerProcess`.
    """
    objective = objective_of(model_config, "per_token")
    model = objective.build_model(model_config, seed=0)
    with contextlib.ExitStack() as stack:
        peer = exported_peer(stack, model, make, (*arguments, ADAMW, is_mixed), keeps_memory, seconds)
        losses = {"ours": _loss(objective, model, batch), "torch": peer.call("loss", *key)}
        check_losses(losses, "`reference` must compute our loss,")
        del model
        yield peer


def exported_peer(stack, model, make, arguments, keeps_memory=False, seconds=None):
    """A `PeerProcess` of `make(FOLDER, *arguments)`, whose folder of transformers has a model's weights."""
    from bert_packed.checkpoints.export_formats import write_hugging_face
    from bert_packed.training.engines.engine import named_weights

    with tempfile.TemporaryDirectory() as folder:
        write_hugging_face(folder, model, named_weights(model))
        peer = PeerProcess(make, folder, *arguments, keeps_memory=keeps_memory, seconds=seconds)
        return stack.enter_context(peer)


def without_padding(batches, multiple=TOKENS_AT_ONCE):
    """The sequences of batch dicts of a BERT one after another: list of dicts of int arrays.

    All have equal numbers of tokens, which `multiple` divides, of predictions and of [CLS], so that one
    program computes them. What fills a batch up is one sequence more, and labels that count for nothing.

        token_ids [[a b c 0] [d e 0 0]], sequence_ids [[1 1 2 0] [1 1 0 0]], multiple 8
        ->   token_ids [a b c d e 0 0 0], lengths [2 1 2 3], cls_positions [0 2 3]
    """
    num_tokens, num_predictions, num_sequences = (
        max(np.count_nonzero(batch[owner]) for batch in batches)
        for owner in ("sequence_ids", "prediction_sequences", "slot_weights")
    )
    num_tokens += -num_tokens % multiple
    return [_concatenated(batch, num_tokens, num_predictions, num_sequences) for batch in batches]


def _concatenated(batch, num_tokens, num_predictions, num_sequences):
    """One batch of `without_padding`, with labels that count for nothing up to these numbers."""

    def filled(values, number, value=0):
        return np.pad(values, (0, number - len(values)), constant_values=value)

    ignored = transformers_models.IGNORED_LABEL
    is_token_BS = batch["sequence_ids"] > 0
    # The place of each token of the packs among all tokens
    places_BS = np.cumsum(is_token_BS).reshape(is_token_BS.shape) - 1
    predicted_BP, used_BK = batch["prediction_sequences"] > 0, batch["slot_weights"] > 0
    rows_B1 = np.arange(len(is_token_BS))[:, None]
    starts = places_BS[rows_B1, batch["cls_positions"]][used_BK]
    ends = np.unique([np.count_nonzero(is_token_BS), num_tokens])
    return {
        **{name: filled(batch[name][is_token_BS], num_tokens) for name in TOKEN_FEATURES},
        "lengths": np.diff(np.concatenate([starts, ends])),
        "prediction_positions": filled(
            places_BS[rows_B1, batch["prediction_positions"]][predicted_BP], num_predictions
        ),
        "labels": filled(batch["prediction_ids"][predicted_BP], num_predictions, ignored),
        "cls_positions": filled(starts, num_sequences),
        "nsp_labels": filled(batch["nsp_labels"][used_BK], num_sequences, ignored),
    }


def _loss(objective, model, batch):
    """Our loss of a batch dict, not compiled."""
    from bert_packed.parallel.targets import devices_here
    from bert_packed.training.backend import products_in

    with products_in("float32", devices_here().platform):
        sums = objective.sums(model(batch, training=False), batch)
    return float(objective.loss(sums, objective.denominators(objective.counts(batch))))


def check_losses(losses, rule):
    """Raise `InputError`, which begins with `rule`, where a way computes another loss than the first."""
    ours, *_ = losses.values()
    for name, loss in losses.items():
        if not abs(loss - ours) <= LOSS_TOLERANCE * abs(ours):
            raise InputError(f"{rule} {ours}. Received: {loss}, {name}.")
