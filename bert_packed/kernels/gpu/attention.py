"""Attention inside the sequences of packs, with dropout: three Pallas kernels for GPUs, forward and backward.

Scores are computed on the chip, a tile of queries and keys at a time. A program of the grid has one tile of a
head and a pack. It loops over the tiles that its tokens may attend to. A sequence is contiguous, so these
are a range, which `tiles_in_reach` finds from the sequence ids. Two packs of 4 tiles of 2 tokens:

    sequence ids   1 1 | 1 2 | 2 2 | 3 0      1 1 | 1 1 | 1 1 | 0 0
    first            0     0     1     3        0     0     0     3
    end              2     3     3     4        3     3     3     4

In the backward pass one kernel has a tile of queries and their range of keys. The other has a tile of keys
and the same range of queries. Between the passes only the result and each query's logarithm of a sum are
kept, so memory grows with S.

Legend: B packs per batch, S pack length, N heads, H head width, T tokens of a tile, n = S / T.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bert_packed.kernels.tpu.attention import may_attend, product
from bert_packed.layers.context import MASKED_SCORE
from bert_packed.layers.dropout import is_kept

# Larger tiles T would spill registers, and 128 takes 1.5 times as long on an H100. Float32 products are made
# without tensor cores, which would round factors
TILES = {"bfloat16": 64, "float32": 32}
MIN_WIDTH = 16  # of a product's factors, for the tensor cores


def attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
    """Attention inside each sequence: float `[B, S, N, H]`.

    Args:
        query_BSNH: float32 or bfloat16, scaled already; 64 divides S.
        sequence_ids_BS: int32, 1..K, 0 is padding, which attends to padding.
        dropout: `RowDropout` of the probabilities `[B, N, S, S]`, or None.
    """
    head_width = query_BSNH.shape[-1]
    # Triton's tiles have powers of 2. Zeros change no product
    missing = max(MIN_WIDTH, pl.next_power_of_2(head_width)) - head_width
    arrays = [jnp.pad(of, ((0, 0),) * 3 + ((0, missing),)) for of in (query_BSNH, key_BSNH, value_BSNH)]
    rate, *words_BNS = dropout or (0.0,)
    reach_Bn = tiles_in_reach(sequence_ids_BS, TILES[query_BSNH.dtype.name])
    return _attend(*arrays, sequence_ids_BS, reach_Bn, tuple(words_BNS), rate)[..., :head_width]


class Reach(NamedTuple):
    """Tiles `first .. end - 1` that the tokens of each tile of a pack may attend to: int32 `[B, n]`."""

    first: object
    end: object


def tiles_in_reach(sequence_ids_BS, tile):
    """The `Reach` of the tiles of packs.

    Exact where ids ascend along a pack and padding is last, as in records; else perhaps too many.
    """
    reaches_Bnn = may_attend(sequence_ids_BS, tile)
    first_Bn = jnp.argmax(reaches_Bnn, axis=-1).astype("int32")
    end_Bn = reaches_Bnn.shape[-1] - jnp.argmax(reaches_Bnn[..., ::-1], axis=-1).astype("int32")
    return Reach(first_Bn, end_Bn)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(query_BSNH, key_BSNH, value_BSNH, ids_BS, reach_Bn, words_BNS, rate):
    return _forward(query_BSNH, key_BSNH, value_BSNH, ids_BS, reach_Bn, words_BNS, rate)[0]


def _forward(query_BSNH, key_BSNH, value_BSNH, ids_BS, reach_Bn, words_BNS, rate):
    packs, length, heads, _ = query_BSNH.shape
    rows_BNS = jax.ShapeDtypeStruct((packs, heads, length), jnp.float32)
    queries = _Queries(query_BSNH, ids_BS, words_BNS)
    keys = _Keys(key_BSNH, value_BSNH, ids_BS)
    result_BSNH, log_sums_BNS = _call(
        _forward_kernel, rate, (reach_Bn, queries, keys), [query_BSNH, rows_BNS], num_products=2
    )
    kept = query_BSNH, key_BSNH, value_BSNH, ids_BS, reach_Bn, words_BNS, result_BSNH, log_sums_BNS
    return result_BSNH, kept


def _backward(rate, kept, gradient_BSNH):
    query_BSNH, key_BSNH, value_BSNH, ids_BS, reach_Bn, words_BNS, result_BSNH, log_sums_BNS = kept
    # The sum over all keys of probabilities times their gradients
    means_BSN = (result_BSNH.astype("float32") * gradient_BSNH.astype("float32")).sum(axis=-1)
    means_BNS = jnp.swapaxes(means_BSN, 1, 2) * (1 - rate)
    queries = _Queries(query_BSNH, ids_BS, words_BNS, gradient_BSNH, log_sums_BNS, means_BNS)
    keys = _Keys(key_BSNH, value_BSNH, ids_BS)
    inputs = reach_Bn, queries, keys
    (query_gradient_BSNH,) = _call(_query_gradient_kernel, rate, inputs, [query_BSNH], num_products=3)
    key_gradients_BSNH = _call(_key_gradients_kernel, rate, inputs, [key_BSNH, value_BSNH], num_products=4)
    return query_gradient_BSNH, *key_gradients_BSNH, None, None, None


_attend.defvjp(_forward, _backward)


class _Queries(NamedTuple):
    """Queries as a kernel reads them: arrays `[B, S, N, H]`, `[B, N, S]` and ids, then a tile of each."""

    query: object
    ids: object
    words: tuple  # starts and strides of dropout, or nothing
    gradient: object = None  # of the result, as all that follows for the backward pass
    log_sums: object = None
    means: object = None


class _Keys(NamedTuple):
    """Keys as a kernel reads them, like `_Queries`."""

    key: object
    value: object
    ids: object


def _forward_kernel(reach, queries, keys, result_TH, log_sums_T, rate):
    mine, tile = pl.program_id(0), log_sums_T.shape[0]
    queries = _tile(queries, mine, tile)

    def add(place, sums):
        totals_TH, highest_T, sums_T = sums
        others = _tile(keys, place, tile)
        scores_TT = _scores(queries, others)
        # A query without a key in the tile has equal scores, and weights of 1. They count until the tile with
        # its own key, where `fading` is exactly 0, or not at all after it
        new_highest_T = jnp.maximum(highest_T, scores_TT.max(axis=1))
        fading_T = jnp.exp(highest_T - new_highest_T)
        weights_TT = jnp.exp(scores_TT - new_highest_T[:, None])
        sums_T = sums_T * fading_T + weights_TT.sum(axis=1)
        if rate:
            weights_TT = jnp.where(_is_kept(queries, place, rate), weights_TT, 0.0)
        values_TH = product(weights_TT.astype(others.value.dtype), others.value, 1, 0)
        return totals_TH * fading_T[:, None] + values_TH, new_highest_T, sums_T

    zeros_T = jnp.zeros(tile, jnp.float32)
    sums = jnp.zeros(result_TH.shape, jnp.float32), zeros_T + MASKED_SCORE, zeros_T
    totals_TH, highest_T, sums_T = lax.fori_loop(reach.first[mine], reach.end[mine], add, sums)
    result_TH[...] = (totals_TH / (sums_T * (1 - rate))[:, None]).astype(result_TH.dtype)
    log_sums_T[...] = highest_T + jnp.log(sums_T)


def _query_gradient_kernel(reach, queries, keys, query_gradient_TH, rate):
    mine, tile = pl.program_id(0), query_gradient_TH.shape[0]
    queries = _tile(queries, mine, tile)

    def add(place, total_TH):
        others = _tile(keys, place, tile)
        _, scores_gradient_TT = _gradients(queries, others, place, rate)
        return total_TH + product(scores_gradient_TT, others.key, 1, 0)

    total_TH = jnp.zeros(query_gradient_TH.shape, jnp.float32)
    total_TH = lax.fori_loop(reach.first[mine], reach.end[mine], add, total_TH)
    query_gradient_TH[...] = (total_TH / (1 - rate)).astype(query_gradient_TH.dtype)


def _key_gradients_kernel(reach, queries, keys, key_gradient_TH, value_gradient_TH, rate):
    mine, tile = pl.program_id(0), key_gradient_TH.shape[0]
    keys = _tile(keys, mine, tile)

    def add(place, totals):
        key_total_TH, value_total_TH = totals
        others = _tile(queries, place, tile)
        # Keys are in rows, as the products need them: the chip would transpose both factors otherwise
        kept_probs_TT, scores_gradient_TT = _gradients(others, keys, mine, rate, query_axis=1)
        key_total_TH += product(scores_gradient_TT, others.query, 1, 0)
        value_total_TH += product(kept_probs_TT, others.gradient, 1, 0)
        return key_total_TH, value_total_TH

    zeros_TH = jnp.zeros(key_gradient_TH.shape, jnp.float32)
    totals = lax.fori_loop(reach.first[mine], reach.end[mine], add, (zeros_TH, zeros_TH))
    for gradient_TH, total_TH in zip((key_gradient_TH, value_gradient_TH), totals, strict=True):
        gradient_TH[...] = (total_TH / (1 - rate)).astype(gradient_TH.dtype)


def _gradients(queries, keys, key_place, rate, query_axis=0):
    """Probabilities that were kept, and the gradient of scores; both times 1 - rate."""
    scores_TT = _scores(queries, keys, query_axis)
    probs_TT = jnp.exp(scores_TT - _along(query_axis, queries.log_sums))
    probs_gradient_TT = _products(queries.gradient, keys.value, query_axis)
    kept_probs_TT = probs_TT
    if rate:
        is_kept_TT = _is_kept(queries, key_place, rate, query_axis)
        kept_probs_TT = jnp.where(is_kept_TT, probs_TT, 0.0)
        probs_gradient_TT = jnp.where(is_kept_TT, probs_gradient_TT, 0.0)
    scores_gradient_TT = probs_TT * (probs_gradient_TT - _along(query_axis, queries.means))
    return kept_probs_TT.astype(keys.key.dtype), scores_gradient_TT.astype(keys.key.dtype)


def _scores(queries, keys, query_axis=0):
    is_own_TT = _along(query_axis, queries.ids) == _along(1 - query_axis, keys.ids)
    return jnp.where(is_own_TT, _products(queries.query, keys.key, query_axis), MASKED_SCORE)


def _is_kept(queries, key_place, rate, query_axis=0):
    tile = queries.ids.shape[0]
    columns_T = (key_place * tile + jnp.arange(tile, dtype="int32")).astype("uint32")
    starts, strides = (_along(query_axis, of_T) for of_T in queries.words)
    return is_kept(rate, starts, strides, _along(1 - query_axis, columns_T))


def _products(of_queries_TH, of_keys_TH, query_axis):
    factors = (of_keys_TH, of_queries_TH) if query_axis else (of_queries_TH, of_keys_TH)
    return product(*factors, 1, 1)


def _along(axis, of_T):
    """Numbers of a tile's tokens along an axis of its scores."""
    return jnp.expand_dims(of_T, 1 - axis)


def _tile(arrays, place, tile):
    return jax.tree.map(lambda of: of[pl.ds(place * tile, tile)], arrays)


def _call(kernel, rate, inputs, outputs, num_products):
    """Run a kernel for each tile, head and pack: it sees its own tokens of outputs, and all of inputs."""
    packs, length, heads, head_width = outputs[0].shape
    dtype = outputs[0].dtype.name
    tile = TILES[dtype]

    def block(of, tokens, place_of):
        if of.ndim == 4:
            return pl.BlockSpec((None, tokens, None, head_width), lambda i, n, b: (b, place_of(i), n, 0))
        if of.ndim == 3:
            return pl.BlockSpec((None, None, tokens), lambda i, n, b: (b, n, place_of(i)))
        return pl.BlockSpec((None, of.shape[1]), lambda i, n, b: (b, 0))

    # The only call of Triton, whose removal from Pallas JAX announces from 0.11 on
    return pl.pallas_call(
        functools.partial(kernel, rate=rate),
        grid=(length // tile, heads, packs),
        in_specs=jax.tree.map(lambda of: block(of, length, lambda i: 0), inputs),
        out_specs=[block(of, tile, lambda i: i) for of in outputs],
        out_shape=[jax.ShapeDtypeStruct(of.shape, of.dtype) for of in outputs],
        # Readers of the program find the operations of all tiles, visited or not
        metadata={"flops": str(2 * num_products * length * outputs[0].size)},
        compiler_params=triton.CompilerParams(
            num_warps=4 if dtype == "bfloat16" and head_width <= 64 else 8,
            num_stages=3 if dtype == "bfloat16" else 2,
        ),
    )(*inputs)
