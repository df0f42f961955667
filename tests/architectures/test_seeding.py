"""A model from a seed has the weights of Keras's own seeding, and leaves everybody's random numbers alone."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny import CONFIG

from bert_packed.architectures.bert.model import PackedBertForPretraining
from bert_packed.architectures.packed_model import build_model, seeded
from bert_packed.architectures.registry import PRETRAINING

pytestmark = pytest.mark.both_backends


def restart():
    """Bring every generator of the process to one state."""
    keras.utils.set_random_seed(5)
    tf.random.get_global_generator().reset_from_seed(5)


def draw():
    """The next numbers of every generator that is not anybody's own."""
    return [
        random.random(),
        np.random.random(),
        *np.asarray(keras.random.uniform((2,))).tolist(),
        *tf.random.uniform((2,)).numpy().tolist(),
        *tf.random.get_global_generator().uniform((2,)).numpy().tolist(),
    ]


def test_random_numbers_of_the_caller_go_on():
    restart()
    first, want = draw(), draw()
    restart()
    assert draw() == first
    build_model(PRETRAINING, CONFIG, seed=1)
    with pytest.raises(ZeroDivisionError), seeded(3):
        random.random() / 0
    assert draw() == want != first


def test_weights_and_dropout_seeds_are_those_of_set_random_seed():
    keras.utils.set_random_seed(7)
    want = PackedBertForPretraining(CONFIG)
    want.build()
    got, other = build_model(PRETRAINING, CONFIG, seed=7), build_model(PRETRAINING, CONFIG, seed=8)
    assert len(want.variables) == len(got.variables)
    for one, two in zip(want.variables, got.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy(), err_msg=one.path)
    tables = [model.bert.embeddings.word_embeddings_VD.numpy() for model in (got, other)]
    assert np.any(tables[0] != tables[1])
