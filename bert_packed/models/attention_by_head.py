"""Attention of one head of one pack after another, as it is fastest where XLA compiles for a CPU.

Scores of all heads of a long pack fill ten megabytes and more, and mask and softmax read and write them
several times. Those of one head of a pack of 512 are one megabyte, which stays in the caches from the product
that makes the scores to the one that reads them (docs/results.md, "Packed inference"). Of shorter packs a
turn takes several heads.

    all B N heads at once, [S, S] each   ->   T = B N / G turns of G heads

Legend: B packs per batch, S pack length, N heads, H head width, G heads in a turn, T turns.
"""

from keras import ops

from bert_packed.models.context import PackContext
from bert_packed.models.cpu_forms import has_no_gradients, is_traced
from bert_packed.models.loops import scan

SCORES_AT_ONCE = 1 << 18  # numbers, as one head of a pack of 512 has: 1 MiB in float32
MANY_SCORES = 4  # times as many: fewer are as fast at once


def goes_by_head(query_BSNH):
    """Whether `attend_by_head` is to compute attention of such queries, float `[B, S, N, H]`.

    In a compiled program of `cpu_forms.without_gradients`, where scores are too many for the caches.
    """
    if not has_no_gradients() or not is_traced() or query_BSNH.shape[0] is None:
        return False
    batch, length, heads, _ = query_BSNH.shape
    return batch * heads * length**2 > MANY_SCORES * SCORES_AT_ONCE


def attend_by_head(attend, query_BSNH, key_BSNH, value_BSNH, context):
    """What a function makes of all heads, computed G heads after another.

    Args:
        attend: Function of such queries, keys and values, and their context, to float `[B, S, N, H]`, which
            treats each head by itself and draws nothing at random.
        query_BSNH, key_BSNH, value_BSNH: float `[B, S, N, H]`; B static.
        context: `PackContext` of the packs.

    Returns:
        float `[B, S, N, H]`. No gradient goes through it.
    """
    batch, length, heads, width = query_BSNH.shape
    at_once = _heads_at_once(batch * heads, length)

    def turn(nothing, slices):
        # Each head is a pack with a head of its own
        *factors, sequence_ids_GS = slices
        factors_GS1H = (one_GSH[:, :, None] for one_GSH in factors)
        return nothing, (attend(*factors_GS1H, PackContext(sequence_ids_GS, None))[:, :, 0],)

    def in_turns(values_BSNH):
        return ops.reshape(ops.transpose(values_BSNH, (0, 2, 1, 3)), (-1, at_once, length, width))

    ids_TGS = ops.reshape(ops.repeat(context.sequence_ids_BS, heads, axis=0), (-1, at_once, length))
    factors_TGSH = map(in_turns, (query_BSNH, key_BSNH, value_BSNH))
    _, (found_TGSH,) = scan(turn, (), (*factors_TGSH, ids_TGS))
    return ops.transpose(ops.reshape(found_TGSH, (batch, heads, length, width)), (0, 2, 1, 3))


def _heads_at_once(num_heads, length):
    """Of so many heads in equal turns, the most whose scores are `SCORES_AT_ONCE` or less; 1 at least."""
    most = min(num_heads, max(1, SCORES_AT_ONCE // length**2))
    return next(number for number in range(most, 0, -1) if num_heads % number == 0)
