"""A third objective, which this test defines, goes through all that trains, saves, reads and audits.

It predicts the next token of each sequence, with a head that the package does not know.

Legend: B packs per batch, S pack length, D model width, V vocabulary.
"""

import dataclasses
import shutil

import numpy as np
import pytest
from keras import ops
from tiny import CONFIG, MAX_SEQ_LENGTH, make_engine, write_data

from bert_packed.architectures.bert.model import PackedBert
from bert_packed.architectures.packed_model import build_seeded
from bert_packed.checkpoints import checkpoint, starting_weights
from bert_packed.core.settings import InputError
from bert_packed.data.batches import CheckedBatches, ReadAhead
from bert_packed.data.input_pipeline import eval_batches, train_batches
from bert_packed.data.read_order import index_files
from bert_packed.evaluation import contamination
from bert_packed.layers.layout import dense
from bert_packed.objectives.features import SEQUENCES
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right
from bert_packed.schema import PackSpec
from bert_packed.tasks.config import LoopSteps
from bert_packed.training import engines, loop
from bert_packed.training.engines.engine import named_weights
from bert_packed.training.metrics_log import MetricsLog, read_rows, rows_to_keep, train_columns
from bert_packed.training.optimization import AdamWeightDecay

pytestmark = [pytest.mark.both_backends, pytest.mark.usefixtures("uncompiled")]
SPEC = PackSpec(MAX_SEQ_LENGTH, 4, 12)
NUM_STEPS = 4
ONE_LAYER = dataclasses.replace(CONFIG, num_hidden_layers=1)
WITH_DROPOUT = dataclasses.replace(ONE_LAYER, hidden_dropout_prob=0.2)


class NextTokenModel(PackedBert):
    """Logits of the token that follows each one."""

    head = "next_token"

    def __init__(self, config, **encoder):
        super().__init__(config, "next", **encoder)
        self.transform = dense(config.hidden_size, config, "transform")

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = ops.convert_to_tensor(self.bert.embeddings.word_embeddings_VD)
        return {"next_logits": ops.matmul(self.transform(hidden_BSD), ops.transpose(table_VD))}


def token_weights(batch):
    """float32 `[B, S - 1]`: the weight of its sequence where the next token is of the same, else 0."""
    ids_BS = batch["sequence_ids"]
    weights_BS = ops.take_along_axis(batch["slot_weights"], ops.maximum(ids_BS - 1, 0), axis=1)
    goes_on = ops.logical_and(ops.equal(ids_BS[:, 1:], ids_BS[:, :-1]), ids_BS[:, 1:] > 0)
    return weights_BS[:, :-1] * ops.cast(goes_on, "float32")


def next_token_sums(outputs, batch):
    nll, right = nll_and_right(outputs["next_logits"][:, :-1], batch["token_ids"][:, 1:])
    weights = token_weights(batch)
    return {
        "next_loss": ops.sum(nll * weights),
        "right": ops.sum(right * weights),
        **next_token_counts(batch),
    }


def next_token_counts(batch):
    return {"num_followed": ops.sum(token_weights(batch)), **count_sequences(batch)}


class NextTokenObjective(Objective):
    def build_model(self, config, seed, dtype="float32", **encoder):
        return build_seeded(lambda: NextTokenModel(config, **encoder), seed, dtype)


def next_token_objective():
    return NextTokenObjective(
        head=NextTokenModel.head,
        features=SEQUENCES,
        outputs={"next_logits": "S"},
        sums=next_token_sums,
        counts=next_token_counts,
        losses={"next_loss": "num_followed"},
        accuracies={"next_accuracy": ("right", "num_followed")},
    )


def next_token_engine(config=ONE_LAYER, micro_batch_size=None, seed=1):
    objective = next_token_objective()
    optimizer = AdamWeightDecay(0.01, weight_decay_rate=0.1)
    return engines.make_engine(objective.build_model(config, seed), objective, optimizer, micro_batch_size)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def train(folder, files, checkpoint_to_restore=None):
    """Run the package's loop on packed records, from the start or from a checkpoint; returns the engine."""
    seed = 1 if checkpoint_to_restore is None else 2  # what is restored must come from the checkpoint
    engine, first_step, state = next_token_engine(WITH_DROPOUT, 2, seed=seed), 0, None
    if checkpoint_to_restore:
        state = checkpoint.restore_checkpoint(checkpoint_to_restore, engine)
        first_step = state["step"]
    features = engine.objective.features
    path = folder / "metrics.csv"
    log = MetricsLog(path, train_columns(engine.objective), rows_to_keep(path, first_step, []))

    def batches(first):
        dataset = train_batches(index_files(files), SPEC, 4, 7, 5, first, features)
        return ReadAhead(CheckedBatches(dataset, files, SPEC, WITH_DROPOUT, features))

    def save(step, state):
        checkpoint.save_checkpoint(folder, step, engine, WITH_DROPOUT, state)

    means = engine.objective.means
    hooks = loop.Hooks(batches, log.write, None, save, lambda: None, lambda _: 0.01, means, print)
    # A row is due every three steps: at the checkpoint of step 2 it is unfinished
    steps = LoopSteps(NUM_STEPS, log_steps=3, save_checkpoints_steps=2, max_skipped_steps=1)
    loop.train(engine, steps, hooks, first_step, state)
    assert engine.num_train_traces == 1
    return engine


def figures(folder):
    """Rows of the log without the columns of speed."""
    names = ("step", "loss", "next_loss", "next_accuracy")
    return [{name: row[name] for name in names} for row in read_rows(folder / "metrics.csv")]


def test_it_trains_and_resumes_bit_for_bit(files, tmp_path):
    whole = train(tmp_path, files)
    rows = figures(tmp_path)
    assert [row["step"] for row in rows] == ["3", "4"] and float(rows[0]["next_loss"]) > 1
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = train(tmp_path, files, tmp_path / "checkpoint-2")
    assert figures(tmp_path) == rows
    for part in ("weights", "training_state"):
        want, got = getattr(whole, part)(), getattr(resumed, part)()
        assert want.keys() == got.keys()
        for name, variable in want.items():
            np.testing.assert_array_equal(got[name].numpy(), variable.numpy(), err_msg=name)
    start = next_token_engine(WITH_DROPOUT).weights()
    assert all(np.any(start[name].numpy() != v.numpy()) for name, v in whole.weights().items())


def test_its_features_alone_are_read_and_their_limits_hold(files):
    features = next_token_objective().features
    batch = next(CheckedBatches(eval_batches(files, SPEC, 4, features), files, SPEC, ONE_LAYER, features))
    assert set(batch) == {feature.name for feature in features} and "nsp_labels" not in batch
    small = dataclasses.replace(ONE_LAYER, vocab_size=5)
    with pytest.raises(InputError, match=r"record 1: every value of input_ids .* below vocab_size=5\."):
        next(CheckedBatches(eval_batches(files, SPEC, 4, features), files, SPEC, small, features))


def failed(engine, files):
    features = engine.objective.features
    batch = next(CheckedBatches(eval_batches(files, SPEC, 4, features), files, SPEC, ONE_LAYER, features))
    checks = contamination.audit(engine, batch)
    assert "unpacked: next_loss" in [check.name for check in checks]
    return {check.name for check in checks if not check.passed}


def test_the_audit_finds_a_loss_that_looks_over_the_edge(files):
    """The last token of a sequence must not be asked for the first of the next."""
    assert failed(next_token_engine(), files) == set()

    def sums(outputs, batch):
        found = next_token_sums(outputs, batch)
        nll, _ = nll_and_right(outputs["next_logits"][:, :-1], batch["token_ids"][:, 1:])
        return {**found, "next_loss": ops.sum(nll * ops.cast(batch["sequence_ids"][:, 1:] > 0, "float32"))}

    engine = next_token_engine()
    engine.objective = dataclasses.replace(engine.objective, sums=sums)
    found = failed(engine, files)
    assert {"unpacked: next_loss", "neighbors: gradient on their embeddings"} <= found
    assert "neighbors: change of next_logits" not in found


def test_it_starts_from_an_encoder_and_its_own_checkpoint(tmp_path):
    pretrained = make_engine(config=ONE_LAYER).weights()
    checkpoint.save_weights(tmp_path / "pretrained", pretrained, ONE_LAYER)
    model = next_token_objective().build_model(ONE_LAYER, 5)
    weights = named_weights(model)
    found = starting_weights.load(tmp_path / "pretrained", weights, ONE_LAYER, model.head)
    assert found.missing == ["transform/kernel", "transform/bias"]
    name = "bert/layer_0/attention/query/kernel"
    np.testing.assert_array_equal(weights[name].numpy(), pretrained[name].numpy())
    checkpoint.save_weights(tmp_path / "own", weights, ONE_LAYER)
    again = named_weights(next_token_objective().build_model(ONE_LAYER, 6))
    assert starting_weights.load(tmp_path / "own", again, ONE_LAYER, model.head).missing == []
    for name, variable in weights.items():
        np.testing.assert_array_equal(again[name].numpy(), variable.numpy(), err_msg=name)
