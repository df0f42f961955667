"""Dropout by a hash of the unit's index: cheap, and the same units on every backend."""

import functools
import operator

import keras
import numpy as np
from keras import ops


class Dropout(keras.layers.Dropout):
    """Keras's dropout layer with the mask of `keep_mask`.

    While `given_seed` is set, that seed counts: a block that is computed again for its gradient must drop the
    same units again, and its own generator would have moved on by then.

    The random numbers of Keras's layer cost more than a quarter of a bert-mini training step on a CPU, these
    nothing that could be measured: XLA fuses them into what reads them.
    """

    given_seed = None

    def call(self, inputs, training=False):
        if not training or self.rate == 0:
            return inputs
        seed = self.seed_generator.next() if self.given_seed is None else self.given_seed
        kept = ops.multiply(inputs, ops.cast(1 / (1 - self.rate), inputs.dtype))
        return ops.where(keep_mask(ops.shape(inputs), self.rate, seed), kept, ops.zeros_like(inputs))


def keep_mask(shape, rate, seed):
    """Which units stay.

    Unit i stays where `mix32(a * i + b) >= rate * 2**32`; an odd a and a b follow from the seed. For one seed
    these are distinct 32-bit numbers, mixed; another seed steps through them in another stride, so that masks
    are not shifted copies of one another, as those of a counter without a stride would be.

    Args:
        shape: Of the result; beyond 2**32 units the mask repeats.
        rate: Share that is dropped, at least 0 and below 1.
        seed: Two whole numbers, as of `keras.random.SeedGenerator.next()`: a seed and a counter.

    Returns:
        bool of that shape.
    """
    seed = ops.cast(seed, "uint32")
    stride = mix32(seed[0] + mix32(seed[1]))
    start = mix32(stride + seed[1])
    odd_stride = ops.bitwise_or(stride, _word(1))
    width = shape[-1]
    num_rows = functools.reduce(operator.mul, shape[:-1], 1)  # a tensor where the batch is of any size
    # From rows and columns: one range over all units would pass int32
    rows = ops.cast(ops.arange(num_rows, dtype="int32"), "uint32")[:, None]
    columns = ops.cast(ops.arange(width, dtype="int32"), "uint32")
    words = mix32((rows * _word(width) + columns) * odd_stride + start)
    return ops.reshape(ops.greater_equal(words, _word(round(rate * 2**32))), shape)


def mix32(words):
    """A bijection of 32-bit words of which every input bit flips every output bit about half of the time.

    Chris Wellons's `triple32` ("Prospecting for Hash Functions", 2018; public domain).

        0 -> 0    1 -> 0x042741d6

    Args:
        words: uint32, any shape.

    Returns:
        uint32 of the same shape.
    """
    for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        words = ops.bitwise_xor(words, ops.right_shift(words, _word(shift))) * _word(multiplier)
    return ops.bitwise_xor(words, ops.right_shift(words, _word(14)))


def _word(value):
    return ops.convert_to_tensor(np.uint32(value))
