"""Attention inside the sequences of packs, with dropout: two Pallas kernels for TPUs, forward and backward.

Scores are computed on the chip, a tile of queries and keys at a time. The grid has one step for each tile in
which some pair may attend, so others are neither computed nor fetched. `tiles_to_visit` makes the table of
these from the sequence ids, and the chip reads it ahead of the tensors. Two packs of 4 tiles of 2 tokens:

    sequence ids       1 1 | 1 2 | 2 2 | 3 0      1 1 | 1 1 | 1 1 | 0 0
    tiles of queries   0 0 1 1 1 2 2 3            4 4 4 5 5 5 6 6 6 7
    tiles of keys      0 1 0 1 2 1 2 3            4 5 6 4 5 6 4 5 6 7

Read the other way round, the same table gives the backward pass the tiles of queries of each tile of keys.
Between the passes only the result and each query's logarithm of a sum are kept, so memory grows with S.

A tile of scores has a key in each row and a query in each column, and totals are transposed alike. Sums over
keys are then sums of vectors, and numbers of a query are stored along the lanes without padding.

Legend: B packs per batch, S pack length, N heads, H head width, D = N * H, U = B * S tokens, T tokens of a
tile, n = S / T tiles of a pack, G groups of heads, J heads of a group, X = J * H.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_packed.layers.context import MASKED_SCORE
from bert_packed.layers.dropout import is_kept

LANES = 128  # of the chip's vectors
# T is the first that divides S. Larger ones would fill the chip's memory with scores
TILES = (512, 384, 256, 128)
GROUP = 96 * 1024  # numbers of a group of heads in a tile of tokens, at most where heads allow


@dataclasses.dataclass(frozen=True)
class _Sizes:
    length: int  # S
    tile: int  # T
    num_groups: int  # G
    group_size: int  # J
    head_width: int  # H
    rate: float  # of dropout

    @property
    def num_tiles(self):
        return self.length // self.tile  # n

    @property
    def width(self):
        return self.group_size * self.head_width  # X

    def heads(self):
        """Place and lanes of each head of a group."""
        width = self.head_width
        places = range(self.group_size)
        return [(slice(head, head + 1), slice(head * width, (head + 1) * width)) for head in places]


def attend(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS, dropout=None):
    """Attention inside each sequence: float `[B, S, N, H]`.

    Args:
        query_BSNH: float32 or bfloat16, scaled already; 128 divides S.
        sequence_ids_BS: int32, 1..K, 0 is padding, which attends to padding.
        dropout: `RowDropout` of the probabilities `[B, N, S, S]`, or None.
    """
    num_packs, length, num_heads, head_width = query_BSNH.shape
    tile = next(tile for tile in TILES if length % tile == 0)
    group_size = _group_size(num_heads, head_width, tile)
    num_groups = num_heads // group_size
    rate, words = 0.0, ()
    if dropout is not None:
        rate, *words_BNS = dropout
        words = tuple(  # `[G, J, U]`
            jnp.swapaxes(of_BNS, 0, 1).reshape(num_groups, group_size, -1) for of_BNS in words_BNS
        )
    result_UD = _attend(
        *(of.reshape(num_packs * length, -1) for of in (query_BSNH, key_BSNH, value_BSNH)),
        sequence_ids_BS.reshape(1, -1),
        tiles_to_visit(sequence_ids_BS, tile),
        words,
        _Sizes(length, tile, num_groups, group_size, head_width, rate),
    )
    return result_UD.reshape(query_BSNH.shape)


def tiles_to_visit(sequence_ids_BS, tile):
    """Pairs of tiles in which some token may attend to another: their number and two int32 `[B * n * n + 2]`.

    Pair i is `(outer[i + 1], inner[i + 1])`, in ascending order; tiles are numbered over all packs. The
    first and last entry are -n. Exact where ids ascend along a pack, as in records; else perhaps too many.
    """
    is_visited_Bnn = may_attend(sequence_ids_BS, tile)
    num_tiles = is_visited_Bnn.shape[-1]
    is_visited = is_visited_Bnn.ravel()
    num_pairs = is_visited.sum(dtype="int32")
    pairs = jnp.argsort(~is_visited, stable=True).astype("int32")  # those to visit come first
    outer = pairs // num_tiles
    inner = outer // num_tiles * num_tiles + pairs % num_tiles
    is_pair = jnp.arange(pairs.size) < num_pairs
    outer, inner = (
        jnp.pad(jnp.where(is_pair, tiles, -num_tiles), 1, constant_values=-num_tiles)
        for tiles in (outer, inner)
    )
    return num_pairs, outer, inner


def may_attend(sequence_ids_BS, tile):
    """True where some token of one tile may attend to one of another: bool `[B, n, n]`.

    Exact where ids ascend along a pack, as in records; else perhaps too often.
    """
    num_packs, length = sequence_ids_BS.shape
    ids_BnT = sequence_ids_BS.reshape(num_packs, length // tile, tile)
    is_padding_BnT = ids_BnT == 0
    has_padding_Bn = is_padding_BnT.any(-1)
    # Padding is kept apart: with it, a tile's range of ids would have all sequences between
    lowest_Bn = jnp.where(is_padding_BnT, jnp.iinfo("int32").max, ids_BnT).min(-1)
    reaches_Bnn = lowest_Bn[:, :, None] <= ids_BnT.max(-1)[:, None]
    both_padded_Bnn = has_padding_Bn[:, :, None] & has_padding_Bn[:, None]
    return (reaches_Bnn & jnp.swapaxes(reaches_Bnn, 1, 2)) | both_padded_Bnn


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(query_UD, key_UD, value_UD, ids_1U, table, words_GJU, sizes):
    return _forward(query_UD, key_UD, value_UD, ids_1U, table, words_GJU, sizes)[0]


def _forward(query_UD, key_UD, value_UD, ids_1U, table, words_GJU, sizes):
    at_query, at_key = _blocks(sizes, 0), _blocks(sizes, 1)
    rows_GJU = jax.ShapeDtypeStruct((sizes.num_groups, sizes.group_size, len(query_UD)), jnp.float32)
    result_UD, log_sums_GJU = _call(
        _forward_kernel,
        sizes,
        table,
        inputs=[
            (query_UD, at_query.tokens),
            (key_UD, at_key.tokens),
            (value_UD, at_key.tokens),
            (ids_1U, at_query.ids),
            (ids_1U, at_key.ids),
            (words_GJU, (at_query.rows,) * len(words_GJU)),
        ],
        outputs=[(query_UD, at_query.tokens), (rows_GJU, at_query.rows)],
        scratch=[(sizes.width, sizes.tile), (sizes.group_size, sizes.tile), (sizes.group_size, sizes.tile)],
        num_products=2,
    )
    return result_UD, (query_UD, key_UD, value_UD, ids_1U, table, words_GJU, result_UD, log_sums_GJU)


def _backward(sizes, kept, gradient_UD):
    query_UD, key_UD, value_UD, ids_1U, table, words_GJU, result_UD, log_sums_GJU = kept
    at_key, at_query = _blocks(sizes, 0), _blocks(sizes, 1)
    # Sums of queries' gradients wait on the chip for all keys of the pack
    of_pack = pl.BlockSpec(
        (sizes.length, sizes.width),
        lambda group, step, outer, _: (lax.div(outer[step + 1], sizes.num_tiles), group),
    )
    gradients_UD = _call(
        _backward_kernel,
        sizes,
        table,
        inputs=[
            (query_UD, at_query.tokens),
            (key_UD, at_key.tokens),
            (value_UD, at_key.tokens),
            (result_UD, at_query.tokens),
            (gradient_UD, at_query.tokens),
            (log_sums_GJU, at_query.rows),
            (ids_1U, at_query.ids),
            (ids_1U, at_key.ids),
            (words_GJU, (at_query.rows,) * len(words_GJU)),
        ],
        outputs=[(query_UD, of_pack), (key_UD, at_key.tokens), (value_UD, at_key.tokens)],
        scratch=[(sizes.num_tiles, sizes.width, sizes.tile), *[(sizes.width, sizes.tile)] * 2],
        num_products=5,
    )
    return *gradients_UD, None, None, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(outer, inner, *refs, sizes):
    # Inputs, outputs, and arrays that stay on the chip
    query_TX, key_TX, value_TX, query_ids_1T, key_ids_1T, words_JT = refs[:6]
    result_TX, log_sums_JT = refs[6:8]
    totals_XT, highest_JT, sums_JT = refs[8:]
    step = pl.program_id(1)
    before, mine, after = (outer[step + place] for place in range(3))

    @pl.when(before != mine)
    def _():
        totals_XT[...] = jnp.zeros_like(totals_XT)
        highest_JT[...] = jnp.full_like(highest_JT, MASKED_SCORE)
        sums_JT[...] = jnp.zeros_like(sums_JT)

    is_own_TT = _is_own(query_ids_1T, key_ids_1T)
    for head, own in sizes.heads():
        scores_TT = _scores(query_TX[:, own], key_TX[:, own], is_own_TT)
        # A query without a key in the tile has equal scores, and weights of 1. They count until the tile with
        # its own key, where `fading` is exactly 0, or not at all after it
        highest_1T = jnp.maximum(highest_JT[head], scores_TT.max(axis=0, keepdims=True))
        fading_1T = jnp.exp(highest_JT[head] - highest_1T)
        weights_TT = jnp.exp(scores_TT - highest_1T)
        highest_JT[head] = highest_1T
        sums_JT[head] = sums_JT[head] * fading_1T + weights_TT.sum(axis=0, keepdims=True)
        if sizes.rate:
            is_kept_TT = _is_kept(words_JT, head, inner[step + 1], sizes)
            weights_TT = jnp.where(is_kept_TT, weights_TT, 0.0)
        values_HT = product(value_TX[:, own], weights_TT.astype(value_TX.dtype), 0, 0)
        totals_XT[own] = totals_XT[own] * fading_1T + values_HT

    @pl.when(mine != after)
    def _():
        for head, own in sizes.heads():
            totals_XT[own] = totals_XT[own] / (sums_JT[head] * (1 - sizes.rate))
        result_TX[...] = totals_XT[...].T.astype(result_TX.dtype)
        log_sums_JT[...] = highest_JT[...] + jnp.log(sums_JT[...])


def _backward_kernel(outer, inner, *refs, sizes):
    # Inputs, outputs, and arrays that stay on the chip
    query_TX, key_TX, value_TX, result_TX, gradient_TX = refs[:5]
    log_sums_JT, query_ids_1T, key_ids_1T, words_JT = refs[5:9]
    query_gradient_SX, key_gradient_TX, value_gradient_TX = refs[9:12]
    query_totals_nXT, key_totals_XT, value_totals_XT = refs[12:]
    step, num_tiles = pl.program_id(1), sizes.num_tiles
    before, mine, after = (outer[step + place] for place in range(3))

    @pl.when(lax.div(before, num_tiles) != lax.div(mine, num_tiles))
    def _():
        query_totals_nXT[...] = jnp.zeros_like(query_totals_nXT)

    @pl.when(before != mine)
    def _():
        key_totals_XT[...] = jnp.zeros_like(key_totals_XT)
        value_totals_XT[...] = jnp.zeros_like(value_totals_XT)

    place = lax.rem(inner[step + 1], num_tiles)
    is_own_TT = _is_own(query_ids_1T, key_ids_1T)
    # A head's sum of these is the sum over all keys of probabilities times their gradients
    products_XT = (result_TX[...].astype("float32") * gradient_TX[...].astype("float32")).T
    for head, own in sizes.heads():
        query_TH, key_TH, value_TH, gradient_TH = (
            of[:, own] for of in (query_TX, key_TX, value_TX, gradient_TX)
        )
        probs_TT = jnp.exp(_scores(query_TH, key_TH, is_own_TT) - log_sums_JT[head])
        probs_gradient_TT = product(value_TH, gradient_TH, 1, 1)
        kept_probs_TT = probs_TT
        if sizes.rate:
            is_kept_TT = _is_kept(words_JT, head, mine, sizes)
            kept_probs_TT = jnp.where(is_kept_TT, probs_TT, 0.0)
            probs_gradient_TT = jnp.where(is_kept_TT, probs_gradient_TT, 0.0)
        # All gradients are divided by 1 - rate at the end, not each unit here
        mean_1T = products_XT[own].sum(axis=0, keepdims=True) * (1 - sizes.rate)
        scores_gradient_TT = (probs_TT * (probs_gradient_TT - mean_1T)).astype(query_TX.dtype)
        value_totals_XT[own] += product(gradient_TH, kept_probs_TT.astype(query_TX.dtype), 0, 1)
        key_totals_XT[own] += product(query_TH, scores_gradient_TT, 0, 1)
        query_totals_nXT[place, own] += product(key_TH, scores_gradient_TT, 0, 0)

    def write(gradient, totals_XT, tokens):
        gradient[tokens] = (totals_XT / (1 - sizes.rate)).T.astype(gradient.dtype)

    @pl.when(mine != after)
    def _():
        write(key_gradient_TX, key_totals_XT[...], ...)
        write(value_gradient_TX, value_totals_XT[...], ...)

    @pl.when(lax.div(mine, num_tiles) != lax.div(after, num_tiles))
    def _():
        @pl.loop(0, num_tiles)
        def _(place):
            tokens = pl.ds(pl.multiple_of(place * sizes.tile, sizes.tile), sizes.tile)
            write(query_gradient_SX, query_totals_nXT[place], tokens)


def _is_own(query_ids_1T, key_ids_1T):
    # The ids of keys are made a column here, since an array `[U, 1]` is padded to `[U, 128]` in memory
    key_ids_T1 = jnp.broadcast_to(key_ids_1T[...], (LANES, key_ids_1T.shape[1])).T[:, :1]
    return key_ids_T1 == query_ids_1T[...]


def _scores(query_TH, key_TH, is_own_TT):
    return jnp.where(is_own_TT, product(key_TH, query_TH, 1, 1), MASKED_SCORE)


def _is_kept(words_JT, head, key_tile, sizes):
    starts_1T, strides_1T = (of_JT[head] for of_JT in words_JT)
    first = lax.rem(key_tile, sizes.num_tiles) * sizes.tile
    columns_T1 = first + lax.broadcasted_iota("int32", (sizes.tile, 1), 0)
    return is_kept(sizes.rate, starts_1T, strides_1T, columns_T1.astype("uint32"))


def product(one, other, axis, other_axis):
    """Float32 sums of products along an axis of two matrices, whose own dtype is float32 or bfloat16."""
    # The precision is explicit: by default a TPU rounds float32 to bfloat16, and a GPU to TF32
    precision = lax.Precision.HIGHEST if one.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((axis,), (other_axis,)), ((), ()))
    return lax.dot_general(one, other, axes, precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    tokens: pl.BlockSpec  # of arrays `[U, D]`
    rows: pl.BlockSpec  # `[G, J, U]`
    ids: pl.BlockSpec  # `[1, U]`


def _blocks(sizes, which):
    """Blocks of the tile that a step has in the outer (0) or inner (1) half of the table."""

    def block(shape, place):
        return pl.BlockSpec(shape, lambda group, step, *table: place(group, table[which][step + 1]))

    return _Blocks(
        block((sizes.tile, sizes.width), lambda group, tile: (tile, group)),
        block((None, sizes.group_size, sizes.tile), lambda group, tile: (group, 0, tile)),
        block((1, sizes.tile), lambda group, tile: (0, tile)),
    )


def _call(kernel, sizes, table, inputs, outputs, scratch, num_products):
    """Run a kernel for each group of heads and pair of the table; inputs and outputs are (array, block)."""
    num_pairs, outer, inner = table
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    num_units = len(arrays[0]) * sizes.length * sizes.num_groups * sizes.group_size
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        out_shape=[jax.ShapeDtypeStruct(of.shape, of.dtype) for of in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(sizes.num_groups, num_pairs),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # The terms are scores; a pack's gradients of queries, two buffers and sums; and blocks of tokens
            vmem_limit_bytes=10 * 2**20 + (12 * sizes.length + 64 * sizes.tile) * sizes.width,
        ),
        # The compiler cannot know how many tiles are visited, so all of them count
        cost_estimate=pl.CostEstimate(
            flops=2 * num_products * num_units * sizes.head_width,
            transcendentals=num_units,
            bytes_accessed=sum(of.size * of.dtype.itemsize for of in jax.tree.leaves((arrays, shapes))),
        ),
    )(outer, inner, *arrays)


def _group_size(num_heads, head_width, tile):
    # Heads side by side fill the lanes of a block: one by one they would be transposed and padded in memory.
    # Smaller tiles take more heads at once, as each step costs time by itself
    sizes = [size for size in range(1, num_heads) if num_heads % size == 0 and size * head_width % LANES == 0]
    sizes.append(num_heads)
    return max((size for size in sizes if size * head_width * tile <= GROUP), default=sizes[0])
