"""Vectors that compare: packed in any micro-batches as one text at a time, and losses as others have them.

The faults that this file alone catches: negatives of a part of a step, a second pass with other dropout than
the first, an equal text as a negative, a vector in another text's slot.

Legend: T texts of a step, D model width.
"""

import contextlib
import dataclasses
import functools

import keras
import numpy as np
import pytest
from keras import ops
from logical_devices import divide_processor
from modern_bert_models import CONFIG as MODERN_BERT
from tiny import CONFIG

import bert_packed
from bert_packed.parallel.replicas import Replicas
from bert_packed.tasks.embed.losses import COSENT, RANKING, LossSettings, embedding_objective, embedding_sums
from bert_packed.training import engines
from bert_packed.training.backend import compiled

pytestmark = pytest.mark.both_backends
NUM_ROWS, NUM_TEXTS, LENGTH, NUM_PACKS, NUM_DEVICES = 6, 3, 24, 8, 4
MODELS = {"bert": CONFIG, "modernbert": dataclasses.replace(MODERN_BERT, initializer_range=0.3)}
BOTH = {"pooling": "cls", "temperature": 0.1, "both_directions": True, "widths": (4,)}
LOSSES = {
    "ranking": LossSettings(RANKING, NUM_ROWS, NUM_TEXTS),
    "both directions, widths, cls": LossSettings(RANKING, NUM_ROWS, NUM_TEXTS, **BOTH),
    "products": LossSettings(RANKING, NUM_ROWS, NUM_TEXTS, normalize=False, temperature=3.0),
    "cosent": LossSettings(COSENT, NUM_ROWS * NUM_TEXTS // 2, 2),
}
# The gradient of a key's bias is 0: it adds the same to all scores of a query
ZERO = "key/bias"


@pytest.fixture(scope="module", autouse=True)
def devices():
    divide_processor(NUM_DEVICES)


def texts(seed=0):
    rng = np.random.default_rng(seed)
    found = [
        rng.integers(5, CONFIG.vocab_size, length).tolist()
        for length in rng.integers(2, 12, NUM_ROWS * NUM_TEXTS)
    ]
    found[3] = found[1]  # the anchor of the second row is the first one's positive
    found[7] = found[4]  # the third row's positive is the second one's
    found[6] = found[9]  # the anchors of the third and fourth row are one
    return found


def batch_of(depth):
    """All texts in packs, of which the last are empty."""
    packs = bert_packed.pack(texts(), LENGTH, depth)
    numbers_BK = packs["sequence_index"]
    num_packs = NUM_PACKS if depth == "max" else 24
    assert len(numbers_BK) <= num_packs
    assert depth == 1 or ((numbers_BK >= 0).sum(axis=1) > 1).all()
    fill = functools.partial(np.pad, pad_width=((0, num_packs - len(numbers_BK)), (0, 0)))
    names = {"token_ids": "input_ids", "sequence_ids": "sequence_ids", "position_ids": "position_ids"}
    batch = {ours: fill(packs[theirs]).astype(np.int32) for ours, theirs in names.items()}
    batch["token_type_ids"] = np.zeros_like(batch["token_ids"])
    slots_K = np.arange(1, numbers_BK.shape[1] + 1)
    batch["cls_positions"] = np.argmax(batch["sequence_ids"][:, None] == slots_K[:, None], axis=2).astype(
        np.int32
    )
    ids = [texts().index(text) + 1 for text in texts()]
    is_used = numbers_BK >= 0
    places = np.where(is_used, numbers_BK + 1, 0)
    scores = np.where(is_used, numbers_BK * 7 % 5, 0)
    batch |= {"slot_weights": fill(is_used).astype(np.float32), "places": fill(places).astype(np.int32)}
    batch["text_ids"] = fill(np.where(is_used, np.array(ids)[numbers_BK], 0)).astype(np.int32)
    return {**batch, "scores": fill(scores).astype(np.float32)}


@functools.cache
def replicas_of(num):
    if num == 1:
        return None
    if keras.backend.backend() == "jax":
        import jax

        return Replicas(num, num, mesh=jax.sharding.Mesh(np.array(jax.devices()[:num]), ("data",)))
    import tensorflow as tf

    return Replicas(num, num, strategy=tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num)]))


def make_engine(loss, config=CONFIG, micro_batch_size=None, num_devices=1, **build):
    from bert_packed.training.optimization import Lamb

    objective, replicas = embedding_objective(LOSSES[loss]), replicas_of(num_devices)
    with replicas.scope() if replicas else contextlib.nullcontext():
        model = objective.build_model(config, 1, **build)
        optimizer = Lamb(0.01, weight_decay_rate=0.01, global_clipnorm=None)
        return engines.make_engine(model, objective, optimizer, micro_batch_size, replicas)


def gradients_of(loss, depth, config=CONFIG, micro_batch_size=None, **build):
    """By the path of a weight; and the mean loss."""
    engine = make_engine(loss, config, micro_batch_size, **build)
    run = compiled(functools.partial(engine.gradients, training=True), engine.model)
    gradients, sums = run(batch_of(depth))
    paths = [variable.path for variable in engine.model.trainable_variables]
    means = engine.objective.means({name: float(value) for name, value in sums.items()})
    assert float(sums["num_sequences"]) == NUM_ROWS * NUM_TEXTS and float(sums["num_rows"]) > 0
    return dict(zip(paths, map(np.asarray, gradients), strict=True)), means["loss"]


@functools.cache
def alone(loss, model="bert"):
    return gradients_of(loss, 1, MODELS[model])


def assert_equal(found, want):
    (gradients, loss), (others, other) = found, want
    assert loss == pytest.approx(other, rel=1e-6)
    for name, values in others.items():
        largest = np.abs(values).max()
        if name.endswith(ZERO):
            assert np.abs(gradients[name]).max() < 1e-5 > largest, name
            continue
        assert largest > 1e-5 or "cls" in name, name
        np.testing.assert_allclose(gradients[name], values, atol=1e-5 * largest, rtol=0, err_msg=name)


def plain_loss(settings, vectors_TD):
    """The mean loss of a step by loops over its texts, none of which is anywhere but in its place."""
    if settings.normalize:
        vectors_TD = vectors_TD / np.linalg.norm(vectors_TD, axis=1, keepdims=True)
    similar_TT = vectors_TD @ vectors_TD.T / settings.temperature
    words, number = texts(), settings.num_texts
    rows = [range(first, first + number) for first in range(0, len(words), number)]
    if settings.kind == COSENT:
        of_rows = [(7 * row[0] % 5, similar_TT[row[0], row[1]]) for row in rows]
        wrong = [np.exp(one - other) for low, one in of_rows for high, other in of_rows if low < high]
        return np.log(1 + sum(wrong))

    def nll(query, answer, candidates):
        """Of a text's answer among candidates, (text, the text that it answers), that are right for it."""
        kept = [similar_TT[query, answer]]
        for text, answered in candidates:
            is_right = words[text] in (words[query], words[answer]) or words[answered] == words[query]
            if not is_right:
                kept.append(similar_TT[query, text])
        return np.log(np.sum(np.exp(kept))) - kept[0]

    answers = [(row[1], row[0]) for row in rows]
    # A hard negative answers no text, here itself
    others = [(text, text) for row in rows for text in row[2:]]
    forward = np.mean([nll(row[0], row[1], answers + others) for row in rows])
    if not settings.both_directions:
        return forward
    return (
        forward + np.mean([nll(row[1], row[0], [(one, two) for two, one in answers]) for row in rows])
    ) / 2


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_those_of_plain_loops(loss):
    settings, batch = LOSSES[loss], batch_of("max")
    vectors_TD = np.random.default_rng(1).normal(size=(NUM_ROWS * NUM_TEXTS, 16))
    places_BK = batch["places"]
    vectors_BKD = np.where(places_BK[..., None] > 0, vectors_TD[places_BK - 1], 9.0).astype(np.float32)
    sums = embedding_sums({"vectors": ops.convert_to_tensor(vectors_BKD)}, batch, settings)
    want = sum(plain_loss(settings, vectors_TD[:, :width]) for width in (16, *settings.widths))
    assert float(sums["loss"]) / settings.batch_size == pytest.approx(want, rel=1e-5)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("loss", "micro_batch_size"), [("ranking", None), *((loss, 2) for loss in LOSSES)])
def test_packed_is_one_text_at_a_time(loss, micro_batch_size):
    assert_equal(gradients_of(loss, "max", micro_batch_size=micro_batch_size), alone(loss))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("model", MODELS)
def test_architectures_with_rematerialisation(model):
    assert_equal(gradients_of("ranking", "max", MODELS[model], 2, remat=True), alone("ranking", model))


def test_the_second_pass_drops_what_the_first_did():
    """Against one gradient through all micro-batches, whose seeds go from one to the next."""
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    engine, batch, size = make_engine("ranking", config, 2), batch_of("max"), 2
    model, objective = engine.model, engine.objective
    parts = [
        {name: values[i : i + size] for name, values in batch.items()} for i in range(0, NUM_PACKS, size)
    ]
    parts = [part for part in parts if part["slot_weights"].any()]
    denominators = objective.denominators(objective.counts(batch))
    slots = objective.slots({k: np.concatenate([part[k] for part in parts]) for k in batch})

    def loss_of(vectors):
        sums = objective.sums({"vectors": ops.concatenate(vectors)}, slots)
        return objective.loss(sums, denominators)

    if keras.backend.backend() == "jax":
        import jax

        def whole(trainable):
            other, vectors = [v.value for v in model.non_trainable_variables], []
            for part in parts:
                outputs, other = model.stateless_call(trainable, other, part, training=True)
                vectors.append(objective.vectors(outputs, part))
            return loss_of(vectors)

        want = jax.jit(jax.grad(whole))([v.value for v in model.trainable_variables])
    else:
        import tensorflow as tf

        seeds = [(v, v.numpy()) for v in model.non_trainable_variables]
        with tf.GradientTape() as tape:
            vectors = [objective.vectors(model(part, training=True), part) for part in parts]
            loss = loss_of(vectors)
        want = tape.gradient(loss, [v.value for v in model.trainable_variables])
        want = [tf.convert_to_tensor(one) for one in want]
        for variable, value in seeds:
            variable.assign(value)
    found, _ = engine.gradients(batch)
    for variable, got, values in zip(model.trainable_variables, found, want, strict=True):
        values = np.asarray(ops.convert_to_tensor(values))
        if not variable.path.endswith(ZERO):
            np.testing.assert_allclose(np.asarray(got), values, atol=1e-5 * np.abs(values).max(), rtol=0)


# TensorFlow compiles two programs for each device. Its collectives keep one number of them a process
DEVICES = [2, 4] if keras.backend.backend() == "jax" else [pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_devices", DEVICES)
def test_devices_compare_the_texts_of_all(num_devices):
    """With dropout, too; a step of each compiles once."""
    config = dataclasses.replace(CONFIG, hidden_dropout_prob=0.2)
    ends = []
    for number in (1, num_devices):
        engine = make_engine("ranking", config, 4, number)
        # Each device's packs are those that one device has in the same micro-batches
        sums = [{k: float(v) for k, v in engine.train_step(batch_of("max")).items()} for _ in range(2)]
        assert engine.num_train_traces == 1
        ends.append((sums, {name: v.numpy() for name, v in engine.weights().items()}))
    (sums, weights), (others, moved) = ends
    for one, other in zip(sums, others, strict=True):
        assert {name: other[name] for name in one} == pytest.approx(one, rel=1e-5)
    for name, values in weights.items():
        if not name.endswith(ZERO):
            np.testing.assert_allclose(moved[name], values, atol=1e-5, err_msg=name)
