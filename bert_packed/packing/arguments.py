"""Checks of callers' arguments: whole numbers, choices, iterables and arrays.

Each raises `ValueError` with one line: the argument, its rule, and what was received.
"""

import math
from collections.abc import Mapping

import numpy as np

WHOLE, NUMBERS = "iu", "biuf"  # kinds of NumPy's types
MAX_SEED = 2**63 - 1


def as_array(values, name, rule, kinds=NUMBERS, shape=None):
    """The NumPy array of an argument, for messages that begin "{name} must {rule}".

    It is a number, nested lists, or an array or tensor of any library. What NumPy has no type for, such as
    bfloat16, becomes float32, which holds each of its values. `kinds` are NumPy's, None for all; an empty
    array of another kind becomes int64. `shape` has None for any size. Masked values are refused.
    """
    try:
        array = _to_numpy(values, kinds)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must {rule}. Received: {shown(values)}.") from error
    # `np.asarray` takes what is behind a mask, in a list of rows too
    rows = values if array.ndim > 1 and isinstance(values, list | tuple) else [values]
    if any(map(np.ma.is_masked, rows)):
        raise ValueError(f"{name} must have no masked values. Received: {shown(values)}.")
    if kinds is not None and array.dtype.kind not in kinds and not array.size:
        array = array.astype(np.int64)
    is_right = kinds is None or array.dtype.kind in kinds
    if shape is not None:
        sizes = zip(shape, array.shape, strict=False)
        is_right &= array.ndim == len(shape) and all(wanted in (None, size) for wanted, size in sizes)
    if not is_right:
        raise ValueError(f"{name} must {rule}. Received: {shown(values)}.")
    return array


def _to_numpy(values, kinds):
    if hasattr(values, "detach"):  # a tensor of torch, which may have a gradient or be on a device
        values = values.detach().cpu()
        if values.is_floating_point() and not hasattr(np, str(values.dtype).rpartition(".")[2]):
            values = values.float()
    array = np.asarray(values)
    is_bfloat16 = array.dtype.kind == "V"  # of JAX and TensorFlow
    return array.astype(np.float32) if is_bfloat16 and kinds is not None else array


def iterate(values, name, rule):
    """An iterator over an argument that is no text and no dict; its items are not looked at."""
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError
        return iter(values)
    except TypeError as error:
        raise ValueError(f"{name} must {rule}. Received: {shown(values)}.") from error


def check_whole(name, value, minimum=0, maximum=None):
    """Check that an argument is a whole number, and no bool, in its inclusive limits."""
    if not is_whole(value) or value < minimum or (maximum is not None and value > maximum):
        limits = f"from {minimum}" + (f" to {maximum:,}" if maximum is not None else "")
        raise ValueError(f"`{name}` must be a whole number {limits}. Received: {shown(value)}.")


def check_choice(name, value, choices):
    """Check that an argument is one of some texts, which may be the keys of a dict."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}. Received: {shown(value)}.")


def is_whole(number, floats=False):
    """True for an integer that is no bool; with `floats` also for 2.0, as JSON may have it."""
    if isinstance(number, bool | np.bool_):
        return False
    is_integer = isinstance(number, int | np.integer)
    return is_integer or (floats and isinstance(number, float | np.floating) and float(number).is_integer())


def is_number(value):
    """True for a finite number that is no bool."""
    return is_whole(value) or (isinstance(value, float | np.floating) and math.isfinite(value))


def shown(value):
    """A value as code, on one line and cut after 100 characters."""
    return " ".join(repr(value).split())[:100]
