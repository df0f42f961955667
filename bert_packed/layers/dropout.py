"""Dropout by a hash of the unit's index: cheap, and the same units on every backend."""

import contextlib
import contextvars
import functools
import operator
from typing import NamedTuple

import keras
import numpy as np
from keras import ops


class Dropout(keras.layers.Dropout):
    """Keras's dropout layer with the mask of `keep_mask`, which XLA fuses into the operation that reads it.

    Keras's own random numbers take more than a quarter of a bert-mini training step on a CPU.
    """

    given_seed = None  # to drop the same units again where a block is recomputed

    def call(self, inputs, training=False):
        if not training or self.rate == 0:
            return inputs
        kept = ops.multiply(inputs, ops.cast(1 / (1 - self.rate), inputs.dtype))
        mask = keep_mask(ops.shape(inputs), self.rate, self.next_seed(), *PLACE.get())
        return ops.where(mask, kept, ops.zeros_like(inputs))

    def rows(self, shape):
        """The `RowDropout` of an array of a shape `[packs, ..., units]`, drawn as by `call`."""
        words = _row_words(shape, self.next_seed(), *PLACE.get())
        return RowDropout(self.rate, *(ops.broadcast_to(of, (*shape[:-1], 1))[..., 0] for of in words))

    def next_seed(self):
        return self.seed_generator.next() if self.given_seed is None else self.given_seed


class RowDropout(NamedTuple):
    """Dropout of the rows of an array `[packs, ..., units]`, for a kernel that asks `is_kept` by itself."""

    rate: float
    starts: object  # uint32 `[packs, ...]`, as the next
    strides: object


# PLACE is the number of the first pack that a layer sees, and of all packs that are computed at once
PLACE = contextvars.ContextVar("place", default=(0, None))


@contextlib.contextmanager
def packs_from(first_pack, num_packs):
    """Context manager: layers that see a part of the packs drop the units that they would drop among all.

    `first_pack`, an int or int32 scalar, is the part's first of the `num_packs` that all devices compute.
    """
    token = PLACE.set((first_pack, num_packs))
    try:
        yield
    finally:
        PLACE.reset(token)


def keep_mask(shape, rate, seed, first_pack=0, num_packs=None):
    """The units that dropout keeps, of a shape `[packs, ..., units]` with fewer than 2**32 rows: bool.

    Unit i is kept where `mix32(a * i + b) >= rate * 2**32`; an odd a and a b follow from the seed. Rows past
    2**32 units count from 0 again, with another a and b. For rows of 3 units and words of 3 bits:

        row             0  1  2  3  4 ...
        first unit      0  3  0  3  0
        a and b number  0  0  1  1  2

    `seed` is a pair of integers, as from `keras.random.SeedGenerator.next()`; packs are as in `packs_from`.
    """
    starts, strides = _row_words(shape, seed, first_pack, num_packs)
    return is_kept(rate, starts, strides, ops.cast(ops.arange(shape[-1], dtype="int32"), "uint32"))


def is_kept(rate, starts, strides, columns):
    """`keep_mask` of the units with given uint32 numbers in their rows, from the rows' `RowDropout`."""
    return ops.greater_equal(mix32(columns * strides + starts), _word(round(rate * 2**32)))


def _row_words(shape, seed, first_pack=0, num_packs=None):
    # uint32 `[*shape[:-1], 1]`, start and stride of each row; a stride that all rows have is a scalar
    seed = ops.cast(seed, "uint32")
    width = shape[-1]
    rows_per_pack = functools.reduce(operator.mul, shape[1:-1], 1)
    rows = _row_numbers(shape) + ops.cast(first_pack, "uint32") * ops.cast(rows_per_pack, "uint32")
    num_packs = num_packs or shape[0]
    # The stride comes from the seed: with a stride of 1, masks of two seeds would be shifted copies
    stride = mix32(seed[0] + mix32(seed[1]))
    # 4,096 packs of BERT-base need rounds. Elsewhere their numbers are 0, and would cost as much as the mask
    if not isinstance(num_packs, int) or num_packs * rows_per_pack * width > 2**32:
        rows_per_round = _word(min(2**32 // width, 2**32 - 1))
        rounds = ops.floor_divide(rows, rows_per_round)
        rows = rows - rounds * rows_per_round
        stride = mix32(seed[0] + mix32(seed[1]) + mix32(rounds))
    start = mix32(stride + seed[1])
    stride = ops.bitwise_or(stride, _word(1))
    return rows * (_word(width) * stride) + start, stride


def _row_numbers(shape):
    # uint32 `[*shape[:-1], 1]`. A sum over the axes: rows counted in one axis and reshaped could not be cut
    # along two axes, as heads of attention on a mesh of devices are
    numbers, rows_per_place = 0, 1
    for axis in reversed(range(len(shape) - 1)):
        # The first length is a tensor where the batch is of any size
        places = ops.cast(ops.arange(shape[axis], dtype="int32"), "uint32") * _word(rows_per_place)
        numbers = numbers + ops.reshape(places, [-1 if other == axis else 1 for other in range(len(shape))])
        rows_per_place = rows_per_place * shape[axis] if axis else rows_per_place
    return numbers


def mix32(words):
    """A bijection of uint32 words: every input bit flips every output bit about half of the time."""
    # The constants are of Chris Wellons's `triple32` ("Prospecting for Hash Functions", 2018; public domain)
    for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        words = ops.bitwise_xor(words, ops.right_shift(words, _word(shift))) * _word(multiplier)
    return ops.bitwise_xor(words, ops.right_shift(words, _word(14)))


def _word(value):
    return ops.convert_to_tensor(np.uint32(value))
