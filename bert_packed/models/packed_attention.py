"""Attention inside the sequences of packs as two Pallas kernels for TPUs, forward and backward, with dropout.

Scores are computed a tile of queries and keys at a time, on the chip. The grid has one step for each tile in
which some pair may attend, so other tiles are neither computed nor fetched: a table made from the sequence
ids, which the chip reads before the tensors, says which tiles a step has. Of two packs, 4 tiles of tokens each:

    sequence ids       1 1 | 1 2 | 2 2 | 3 0      1 1 | 1 1 | 1 1 | 0 0
    tiles of queries   0 0 1 1 1 2 2 3            4 4 4 5 5 5 6 6 6 7
    tiles of keys      0 1 0 1 2 1 2 3            4 5 6 4 5 6 4 5 6 7

The relation is symmetric, so the same table gives the backward pass the tiles of queries of each tile of keys.
Memory grows with S: the forward pass keeps its result and the logarithm of each row's sum.

Inside, a tile of scores has a key in each row and a query in each column. So sums over keys need no exchange
between lanes, and what belongs to a query lies along the lanes, as in an array `[J, T]`.

Legend: B packs per batch, S pack length, N heads, H head width, D = N * H, U = B * S tokens, T tokens of a
tile, n = S / T, G groups of heads, J heads of a group, X = J * H.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_packed.models.context import MASKED_SCORE
from bert_packed.models.dropout import is_kept

LANES = 128  # of a vector of the chip
TILES = (512, 384, 256, 128)


def attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None, tile=None):
    """Attention inside each sequence: float `[B, S, N, H]`.

    Args:
        query_BSNH: float32 or bfloat16, scaled already; 128 divides S.
        sequence_ids_BS: int32, 1..K, 0 is padding, which attends to padding.
        dropout: Rate and `dropout.row_words` of the probabilities `[B, N, S, S]`, or None.
        tile: T, for tests.
    """
    num_packs, length, num_heads, _ = query_BSNH.shape
    rate, *words = dropout or (0.0,)
    words = tuple(jnp.broadcast_to(of, (num_packs, num_heads, length, 1)) for of in words)
    tile = tile or next(tile for tile in TILES if length % tile == 0)
    return _attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, words, rate, tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, words, rate, tile):
    return _forward(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, words, rate, tile)[0]


def _forward(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, words, rate, tile):
    num_packs, length, num_heads, head_width = query_BSNH.shape
    num_groups = _num_groups(num_heads, head_width)
    tokens, rows, ids = _specs(query_BSNH, tile, table=0)
    key_tokens, _, key_ids = _specs(query_BSNH, tile, table=1)
    query_UD, key_UD, value_UD = map(_flat, (query_BSNH, key_BSNH, value_BSNH))
    ids_1U = sequence_ids_BS.reshape(1, -1)
    words_GJU = tuple(_by_group(of[..., 0], num_groups) for of in words)
    width, num_in_group = query_UD.shape[1] // num_groups, num_heads // num_groups
    result_UD, log_sums_GJU = _call(
        functools.partial(_forward_kernel, num_tiles=length // tile, rate=rate),
        tiles_to_visit(sequence_ids_BS, tile),
        num_groups,
        [(query_UD, tokens), (key_UD, key_tokens), (value_UD, key_tokens), (ids_1U, ids), (ids_1U, key_ids)]
        + [(words_GJU, (rows,) * len(words))],
        [
            (jax.ShapeDtypeStruct(query_UD.shape, query_UD.dtype), tokens),
            (jax.ShapeDtypeStruct((num_groups, num_in_group, len(query_UD)), jnp.float32), rows),
        ],
        [
            pltpu.VMEM((width, tile), jnp.float32),
            pltpu.VMEM((num_in_group, tile), jnp.float32),
            pltpu.VMEM((num_in_group, tile), jnp.float32),
        ],
    )
    result_BSNH = result_UD.reshape(query_BSNH.shape)
    kept = query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, words, result_BSNH, log_sums_GJU
    return result_BSNH, kept


def _backward(rate, tile, kept, gradient_BSNH):
    query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, words, result_BSNH, log_sums_GJU = kept
    num_packs, length, num_heads, head_width = query_BSNH.shape
    num_groups = _num_groups(num_heads, head_width)
    num_tiles = length // tile
    tokens, _, ids = _specs(query_BSNH, tile, table=0)
    query_tokens, query_rows, query_ids = _specs(query_BSNH, tile, table=1)
    query_UD, key_UD, value_UD, result_UD, gradient_UD = map(
        _flat, (query_BSNH, key_BSNH, value_BSNH, result_BSNH, gradient_BSNH)
    )
    ids_1U = sequence_ids_BS.reshape(1, -1)
    words_GJU = tuple(_by_group(of[..., 0], num_groups) for of in words)
    width = query_UD.shape[1] // num_groups
    whole = pl.BlockSpec((length, width), lambda group, step, firsts, _: (lax.div(firsts[step + 1], num_tiles), group))
    gradients_UD = _call(
        functools.partial(_backward_kernel, num_tiles=num_tiles, rate=rate),
        tiles_to_visit(sequence_ids_BS, tile),
        num_groups,
        [(query_UD, query_tokens), (key_UD, tokens), (value_UD, tokens)]
        + [(result_UD, query_tokens), (gradient_UD, query_tokens)]
        + [(log_sums_GJU, query_rows), (ids_1U, query_ids), (ids_1U, ids)]
        + [(words_GJU, (query_rows,) * len(words))],
        [
            (jax.ShapeDtypeStruct(of.shape, of.dtype), spec)
            for of, spec in ((query_UD, whole), (key_UD, tokens), (value_UD, tokens))
        ],
        [
            pltpu.VMEM((num_tiles, width, tile), jnp.float32),
            pltpu.VMEM((width, tile), jnp.float32),
            pltpu.VMEM((width, tile), jnp.float32),
        ],
    )
    return *(of.reshape(query_BSNH.shape) for of in gradients_UD), None, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(
    queries,
    keys,
    query_TX,
    key_TX,
    value_TX,
    query_ids_1T,
    key_ids_1T,
    words_JT,
    result_TX,
    log_sums_JT,
    totals_XT,
    maxima_JT,
    sums_JT,
    *,
    num_tiles,
    rate,
):
    before, mine, after = (queries[pl.program_id(1) + place] for place in range(3))

    @pl.when(before != mine)
    def _():
        totals_XT[...] = jnp.zeros_like(totals_XT)
        maxima_JT[...] = jnp.full_like(maxima_JT, MASKED_SCORE)
        sums_JT[...] = jnp.zeros_like(sums_JT)

    is_own_TT = _column(key_ids_1T[...]) == query_ids_1T[...]
    columns_T1 = _columns(keys, num_tiles, len(is_own_TT))
    for head, own in _heads(maxima_JT, totals_XT.shape[0]):
        scores_TT = _scores(key_TX[:, own], query_TX[:, own], is_own_TT)
        # Where a query has no key in the tile, all is `MASKED_SCORE`: what it adds fades to 0 with its own key
        maxima_1T = jnp.maximum(maxima_JT[head], scores_TT.max(axis=0, keepdims=True))
        fading_1T = jnp.exp(maxima_JT[head] - maxima_1T)
        weights_TT = jnp.exp(scores_TT - maxima_1T)
        sums_JT[head] = sums_JT[head] * fading_1T + weights_TT.sum(axis=0, keepdims=True)
        maxima_JT[head] = maxima_1T
        if rate:
            weights_TT = jnp.where(_is_kept(rate, words_JT, head, columns_T1), weights_TT, 0.0)
        weighted_HT = _product(value_TX[:, own], weights_TT.astype(value_TX.dtype), (0, 0))
        totals_XT[own] = totals_XT[own] * fading_1T + weighted_HT

    @pl.when(mine != after)
    def _():
        for head, own in _heads(maxima_JT, totals_XT.shape[0]):
            totals_XT[own] = totals_XT[own] / (sums_JT[head] * (1 - rate))
        result_TX[...] = totals_XT[...].T.astype(result_TX.dtype)
        log_sums_JT[...] = maxima_JT[...] + jnp.log(sums_JT[...])


def _backward_kernel(
    keys,
    queries,
    query_TX,
    key_TX,
    value_TX,
    result_TX,
    gradient_TX,
    log_sums_JT,
    query_ids_1T,
    key_ids_1T,
    words_JT,
    query_gradient_SX,
    key_gradient_TX,
    value_gradient_TX,
    query_totals_nXT,
    key_totals_XT,
    value_totals_XT,
    *,
    num_tiles,
    rate,
):
    before, mine, after = (keys[pl.program_id(1) + place] for place in range(3))
    width, tile = key_totals_XT.shape

    @pl.when(lax.div(before, num_tiles) != lax.div(mine, num_tiles))
    def _():
        query_totals_nXT[...] = jnp.zeros_like(query_totals_nXT)

    @pl.when(before != mine)
    def _():
        key_totals_XT[...] = jnp.zeros_like(key_totals_XT)
        value_totals_XT[...] = jnp.zeros_like(value_totals_XT)

    place = lax.rem(queries[pl.program_id(1) + 1], num_tiles)
    is_own_TT = _column(key_ids_1T[...]) == query_ids_1T[...]
    columns_T1 = _columns(keys, num_tiles, tile)
    # Summed over a head's width, the sum over all keys of probabilities times their gradients
    products_XT = (result_TX[...].astype(jnp.float32) * gradient_TX[...].astype(jnp.float32)).T * (1 - rate)
    for head, own in _heads(log_sums_JT, width):
        query_TH, key_TH, value_TH, gradient_TH = (
            of[:, own] for of in (query_TX, key_TX, value_TX, gradient_TX)
        )
        probs_TT = jnp.exp(_scores(key_TH, query_TH, is_own_TT) - log_sums_JT[head])
        products_TT = _product(value_TH, gradient_TH, (1, 1))
        kept_TT = probs_TT
        if rate:
            is_kept_TT = _is_kept(rate, words_JT, head, columns_T1)
            kept_TT, products_TT = (jnp.where(is_kept_TT, of, 0.0) for of in (probs_TT, products_TT))
        value_totals_XT[own] += _product(gradient_TH, kept_TT.astype(query_TH.dtype), (0, 1))
        # All three gradients are too small by the factor 1 - rate, up to the end
        scores_TT = (probs_TT * (products_TT - products_XT[own].sum(axis=0, keepdims=True))).astype(query_TH.dtype)
        key_totals_XT[own] += _product(query_TH, scores_TT, (0, 1))
        query_totals_nXT[place, own] += _product(key_TH, scores_TT, (0, 0))

    @pl.when(mine != after)
    def _():
        for total, out in ((key_totals_XT, key_gradient_TX), (value_totals_XT, value_gradient_TX)):
            out[...] = (total[...] / (1 - rate)).T.astype(out.dtype)

    @pl.when(lax.div(mine, num_tiles) != lax.div(after, num_tiles))
    def _():
        @pl.loop(0, num_tiles)
        def _(place):
            tokens = pl.ds(pl.multiple_of(place * tile, tile), tile)
            totals_XT = query_totals_nXT[place] / (1 - rate)
            query_gradient_SX[tokens] = totals_XT.T.astype(query_gradient_SX.dtype)


def _scores(key_TH, query_TH, is_own_TT):
    return jnp.where(is_own_TT, _product(key_TH, query_TH, (1, 1)), MASKED_SCORE)


def _is_kept(rate, words_JT, head, columns_T1):
    starts_JT, strides_JT = words_JT
    return is_kept(rate, starts_JT[head], strides_JT[head], columns_T1)


def _heads(rows_JT, width):
    """Rows and lanes of each head of a group."""
    num_heads = rows_JT.shape[0]
    step = width // num_heads
    return [(slice(head, head + 1), slice(head * step, (head + 1) * step)) for head in range(num_heads)]


def _columns(keys, num_tiles, tile):
    first = lax.rem(keys[pl.program_id(1) + 1], num_tiles) * tile
    return (first + lax.broadcasted_iota(jnp.int32, (tile, 1), 0)).astype(jnp.uint32)


def _column(ids_1T):
    return jnp.broadcast_to(ids_1T, (LANES, ids_1T.shape[1])).T[:, :1]


def _product(one, other, axes):
    # Explicit: the default precision on TPUs would round float32 to bfloat16
    precision = lax.Precision.HIGHEST if one.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(one, other, dimensions, precision, preferred_element_type=jnp.float32)


def _call(kernel, tables, num_groups, inputs, outputs, scratch):
    firsts, seconds, num_pairs = tables
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_groups, num_pairs),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=64 * 2**20
        ),
    )(firsts, seconds, *arrays)


def _specs(query_BSNH, tile, table):
    """Blocks of `[U, D]`, `[G, J, U]` and `[1, U]` for the tile of tokens that a table has for a step."""
    num_heads, head_width = query_BSNH.shape[2:]
    num_in_group = num_heads // _num_groups(num_heads, head_width)

    def place(step, tables):
        return tables[table][step + 1]

    return (
        pl.BlockSpec((tile, num_in_group * head_width), lambda group, step, *tables: (place(step, tables), group)),
        pl.BlockSpec((None, num_in_group, tile), lambda group, step, *tables: (group, 0, place(step, tables))),
        pl.BlockSpec((1, tile), lambda group, step, *tables: (0, place(step, tables))),
    )


def _num_groups(num_heads, head_width):
    # Heads side by side fill the lanes of a block: heads by themselves would have to be transposed and padded
    sizes = (size for size in range(1, num_heads) if num_heads % size == 0 and size * head_width % LANES == 0)
    return num_heads // next(sizes, num_heads)


def _flat(values_BSNH):
    num_packs, length, num_heads, head_width = values_BSNH.shape
    return values_BSNH.reshape(num_packs * length, num_heads * head_width)


def _by_group(values_BNS, num_groups):
    """`[G, J, U]`."""
    num_packs, num_heads, length = values_BNS.shape
    return jnp.swapaxes(values_BNS, 0, 1).reshape(num_groups, num_heads // num_groups, num_packs * length)


def tiles_to_visit(sequence_ids_BS, tile):
    """Pairs of tiles in which some token may attend to another: two int32 `[B * n * n + 2]` and their number.

    Pair i is `(firsts[i + 1], seconds[i + 1])`, ascending; tiles are numbered over all packs. Before and after
    the pairs stands -1. Where ids ascend there are exactly these pairs, else perhaps more.
    """
    num_packs, length = sequence_ids_BS.shape
    ids_BnT = jnp.reshape(sequence_ids_BS, (num_packs, length // tile, tile))
    is_padding_BnT = ids_BnT == 0
    has_padding_Bn = is_padding_BnT.any(-1)
    # Not a range of all ids: padding between two sequences would join a tile to all between
    lowest_Bn = jnp.where(is_padding_BnT, jnp.iinfo("int32").max, ids_BnT).min(-1)
    highest_Bn = ids_BnT.max(-1)
    is_below_Bnn = lowest_Bn[:, :, None] <= highest_Bn[:, None]
    is_visited_Bnn = (is_below_Bnn & jnp.swapaxes(is_below_Bnn, 1, 2)) | (
        has_padding_Bn[:, :, None] & has_padding_Bn[:, None]
    )
    num_tiles = ids_BnT.shape[1]
    num_pairs = is_visited_Bnn.sum(dtype="int32")
    pairs = jnp.argsort(~is_visited_Bnn.ravel(), stable=True).astype("int32")
    firsts = pairs // num_tiles
    seconds = firsts // num_tiles * num_tiles + pairs % num_tiles
    is_pair = jnp.arange(pairs.size) < num_pairs
    firsts, seconds = (
        jnp.pad(jnp.where(is_pair, tiles, -num_tiles), 1, constant_values=-num_tiles) for tiles in (firsts, seconds)
    )
    return firsts, seconds, num_pairs
