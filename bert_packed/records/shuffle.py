"""Shuffles that are computed for any few items alone, so that the rest is never held.

A shuffle of n items is a permutation of 0..n-1 drawn by a key. Nobody stores it, so a billion items cost no
memory, and every process finds the same answer without asking another.

The method is a Feistel network on a x b >= n cells (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002): the row moves by a hash of the column, then the column by a hash of the row, and so on. Each
move can be undone, so no two items meet; an item that lands on a cell from n on moves again.
"""

import numpy as np

NUM_ROUNDS = 6  # four suffice to look random to statistics; two more cost little
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffle_places(items, num_items, key):
    """The places of some items in a shuffle: int64 `[m]`, each in 0..num_items-1.

        items [0 1 2 3 4] of 5   ->   for instance [3 0 4 1 2]: each of 0..4 once

    `num_items` is an array `[m]` where the items belong to shuffles of different sizes; `key` is a tuple of
    whole numbers, or arrays `[m]`, that chooses the shuffle.
    """
    return _walk(items, num_items, key, undo=False)


def find_items(places, num_items, key):
    """The items at some places of a shuffle: `shuffle_places` undone; the same arguments, and int64 `[m]`."""
    return _walk(places, num_items, key, undo=True)


def hash_numbers(*numbers):
    """A hash of each tuple of whole numbers, uint64 of the shape that the arrays have together, or `[1]`."""
    mixed = np.zeros(1, np.uint64)  # NumPy warns where scalars wrap around
    for number in numbers:
        mixed = _mix(mixed ^ np.asarray(number, np.uint64))
    return mixed


def _walk(cells, num_items, key, undo):
    """Move cells until each is one of the items, of which there may be fewer than cells."""
    cells = np.asarray(cells, np.uint64)
    sizes = np.broadcast_to(np.asarray(num_items, np.uint64), cells.shape)
    num_rows = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    num_rows = np.maximum(num_rows, np.uint64(1))
    num_columns = (sizes + num_rows - np.uint64(1)) // num_rows
    num_columns = np.maximum(num_columns, np.uint64(1))
    mixed_key = np.broadcast_to(hash_numbers(*key), cells.shape)
    moved = _move(cells, num_rows, num_columns, mixed_key, undo)
    outside = np.flatnonzero(moved >= sizes)
    while len(outside):
        again = _move(moved[outside], num_rows[outside], num_columns[outside], mixed_key[outside], undo)
        moved[outside] = again
        outside = outside[again >= sizes[outside]]
    return moved.astype(np.int64)


def _move(cells, num_rows, num_columns, key, undo):
    rows, columns = cells // num_columns, cells % num_columns
    rounds = range(NUM_ROUNDS)
    for number in reversed(rounds) if undo else rounds:
        if number % 2:
            columns = _shift(columns, _hash(key, rows, number), num_columns, undo)
        else:
            rows = _shift(rows, _hash(key, columns, number), num_rows, undo)
    return rows * num_columns + columns


def _shift(places, steps, number, undo):
    """Move places of 0..number-1 round by some steps, or back."""
    steps = steps % number
    return (places + (number - steps if undo else steps)) % number


def _hash(key, values, number):
    salt = np.uint64(number * int(GOLDEN) % 2**64)
    return _mix(key ^ _mix(values + salt))


def _mix(values):
    """A hash of 64-bit numbers: the finalizer of splitmix64."""
    values = values + GOLDEN  # uint64 arrays wrap around without a warning
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
