"""Dropout by a hash: the share that it drops, the scale, and masks that do not resemble one another."""

import dataclasses

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from keras import ops

from bert_packed.architectures.packed_model import build_model
from bert_packed.architectures.registry import CLASSIFICATION, MASKED_LM
from bert_packed.layers.dropout import Dropout, is_kept, keep_mask, packs_from
from bert_packed.layers.rematerialisation import find_dropouts
from bert_packed.training.backend import compiled

pytestmark = pytest.mark.both_backends  # the formula's test on each: they drop the same units


def mask_of(shape, rate, seed=7, counter=0):
    return np.asarray(keep_mask(shape, rate, np.array([seed, counter])))


def plain_mix32(word):
    """`mix32` of one whole number, by Python's integers."""
    for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        word = (word ^ (word >> shift)) * multiplier % 2**32
    return word ^ (word >> 14)


def test_the_mask_is_the_formula_element_by_element():
    seed, counter, rate = 123456789, 41, 0.3
    stride = plain_mix32((seed + plain_mix32(counter)) % 2**32)
    start = plain_mix32((stride + counter) % 2**32)
    expected = [
        plain_mix32((unit * (stride | 1) + start) % 2**32) >= round(rate * 2**32) for unit in range(60)
    ]
    assert mask_of((3, 4, 5), rate, seed, counter).ravel().tolist() == expected


def test_rows_past_32_bits_are_numbered_again():
    """Packs have 2 rows of 1,000 units; those around the place where 32-bit numbers wrap are drawn."""
    seed, counter, rate, width = 11, 3, 0.5, 1000
    rows_per_wrap = 2**32 // width
    first_pack = rows_per_wrap // 2
    found = keep_mask((2, 2, width), rate, np.array([seed, counter]), first_pack, 2 * first_pack)
    wraps = []
    for row, mask in enumerate(np.asarray(found).reshape(4, width), 2 * first_pack):
        wrap, place = divmod(row, rows_per_wrap)
        wraps.append(wrap)
        stride = plain_mix32((seed + plain_mix32(counter) + plain_mix32(wrap)) % 2**32)
        start = plain_mix32((stride + counter) % 2**32)
        units = range(place * width, (place + 1) * width)
        words = [plain_mix32((unit * (stride | 1) + start) % 2**32) for unit in units]
        assert mask.tolist() == [word >= round(rate * 2**32) for word in words]
    assert wraps == [0, 1, 1, 1]


def test_a_part_of_the_packs_has_the_masks_of_all():
    whole = np.asarray(keep_mask((6, 3, 5), 0.5, np.array([7, 1])))
    parts = [keep_mask((2, 3, 5), 0.5, np.array([7, 1]), first, 6) for first in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in parts]), whole)


@pytest.mark.parametrize("num_packs", [6, 2**23])
def test_words_of_rows_give_the_mask_of_any_part(num_packs):
    layer, shape = Dropout(0.5), (2, 3, 700)
    layer.given_seed = np.array([7, 1])
    first_pack = 4 if num_packs == 6 else 2**32 // 700 // 3  # there, rows on both sides of 2**32 units
    with packs_from(first_pack, num_packs):
        rate, starts, strides = layer.rows(shape)
    assert starts.shape == strides.shape == shape[:2]
    columns = ops.cast(ops.arange(300, 400), "uint32")
    part = is_kept(rate, starts[:, :2, None], strides[:, :2, None], columns)
    mask = keep_mask(shape, 0.5, layer.given_seed, first_pack, num_packs)
    np.testing.assert_array_equal(part, mask[:, :2, 300:400])


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.99])
def test_share_dropped(rate):
    num_units = 512 * 2048
    dropped = num_units - mask_of((512, 2048), rate).sum()
    # the limit is five standard deviations
    assert abs(dropped - rate * num_units) < 5 * np.sqrt(rate * (1 - rate) * num_units)


def agreement(first, second):
    """Standard deviations by which two masks of rate 0.5 agree more or less often than by chance."""
    return abs((first == second).mean() - 0.5) * 2 * np.sqrt(first.size)


def test_masks_of_other_steps_layers_and_places_are_unrelated():
    masks = [mask_of((512, 512), 0.5, seed, counter) for seed in (7, 8, 7 << 16) for counter in range(4)]
    distances = [agreement(masks[i], masks[j]) for i in range(len(masks)) for j in range(i)]
    first = masks[0].ravel()
    distances += [agreement(first[:-shift], first[shift:]) for shift in (1, 2, 3, 8, 64, 511, 512, 513, 1024)]
    assert max(distances) < 5
    # one of 75 comparisons of a quarter of a million coins is above 1 for sure
    assert max(distances) > 1


def test_kept_units_are_scaled_and_dropped_ones_are_0():
    layer = Dropout(0.25, seed=3, dtype="mixed_bfloat16")
    result = layer(np.ones((64, 64), np.float32), training=True)
    assert keras.backend.standardize_dtype(result.dtype) == "bfloat16"
    result = np.asarray(ops.cast(result, "float32"))
    assert 0.65 < (result > 0).mean() < 0.85
    np.testing.assert_allclose(np.unique(result), [0, 1 / 0.75], rtol=2**-8)


def test_a_batch_of_any_size():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("only TensorFlow traces with unknown sizes")
    import tensorflow as tf

    layer = Dropout(0.5, seed=3)
    layer.given_seed = np.array([1, 2])
    signature = [tf.TensorSpec((None, 4), tf.float32)]
    run = tf.function(lambda values: layer(values, training=True), input_signature=signature)
    for size in (3, 5):
        kept = np.asarray(run(np.ones((size, 4), np.float32))) != 0
        np.testing.assert_array_equal(kept, mask_of((size, 4), 0.5, 1, 2))


def test_each_call_in_training_drops_other_units():
    layer, values = Dropout(0.5, seed=3), np.ones((64, 64), np.float32)
    first, second = np.asarray(layer(values, training=True)), np.asarray(layer(values, training=True))
    assert (first != second).any()
    for result in (layer(values), layer(values, training=False), Dropout(0.0)(values, training=True)):
        np.testing.assert_array_equal(result, values)
    # A given seed gives the same mask, and moves no generator
    before = np.asarray(layer.seed_generator.state.value)
    layer.given_seed = np.array([1, 2])
    np.testing.assert_array_equal(layer(values, training=True), layer(values, training=True))
    np.testing.assert_array_equal(layer.seed_generator.state.value, before)


def test_compiled_and_not_compiled_drop_the_same():
    seed = np.array([5, 6])
    run = compiled(lambda values: ops.where(keep_mask(values.shape, 0.5, seed), values, 0.0))
    values = np.ones((16, 33), np.float32)
    np.testing.assert_array_equal(np.asarray(run(values)) == 1, mask_of((16, 33), 0.5, 5, 6))


# Blocks have each rate in as many layers; a ModernBERT's attention drops probabilities and its result
RATES = {
    "bert": {"hidden_dropout_prob": 1 + 2 * 2, "attention_probs_dropout_prob": 2},
    "modernbert": {"embedding_dropout": 1, "attention_dropout": 2 * 3, "mlp_dropout": 3},
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "head", "more"), [("bert", CLASSIFICATION, 1), ("modernbert", MASKED_LM, 0)]
)
def test_every_layer_drops_by_its_rate_in_training_alone(name, head, more):
    architecture = ARCHITECTURES[name]
    assert architecture.dropout == tuple(RATES[name])
    packed, _ = architecture.batches()
    rates = {rate: 0.3 + 0.1 * number for number, rate in enumerate(RATES[name])}
    model = build_model(head, dataclasses.replace(architecture.config, **rates), seed=1, num_outputs=3)
    layers = [(layer, layer.rate) for layer in find_dropouts(model)]
    for rate, count in RATES[name].items():
        found = [layer for layer, its_rate in layers if its_rate == rates[rate]]
        assert len(found) == count + (more if rate == "hidden_dropout_prob" else 0)

    def run(training):
        return np.concatenate([np.ravel(values) for values in model(packed, training=training).values()])

    sound = run(training=False)
    for layer, _ in layers:
        layer.rate = 0.0
    np.testing.assert_array_equal(run(training=True), sound)
    for layer, rate in layers:
        layer.rate = rate
        first, second = run(training=True), run(training=True)
        assert np.any(first != sound) and np.any(first != second), layer.path
        layer.rate = 0.0
