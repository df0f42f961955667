"""Losses that compare the vectors of all texts of a step, and their objective.

A step has N rows of the file, of R texts each: an anchor, its positive, and hard negatives; or the two
sentences of a score. A text's *place* in the step is `row * R + role + 1`; 0 is an unused slot.

Legend: B packs per step, K sequences per pack, S pack length, D model width, N rows, R texts of a row.
"""

import dataclasses
import functools

from keras import ops

from bert_packed.architectures.registry import EMBEDDING
from bert_packed.layers.context import pool_sequences
from bert_packed.objectives.features import SEQUENCES, Feature
from bert_packed.objectives.objective import Objective, count_sequences, nll_and_right

PLACES = Feature("places", "K")
TEXT_IDS = Feature("text_ids", "K")  # equal for equal texts
SCORES = Feature("scores", "K")  # of a row, at its first text
MASKED = -1e9  # a similarity whose exponential is 0 beside any other
RANKING, COSENT = "ranking", "cosent"


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What a loss compares, and how."""

    # In a `RANKING` an anchor must find its positive among all texts of the step that are no anchors; in
    # `COSENT` pairs must be as similar as the order of their scores says
    kind: str
    batch_size: int  # N
    num_texts: int  # R
    pooling: str = "mean"  # over a sequence's tokens, or "cls"
    normalize: bool = True  # for cosines, else products
    temperature: float = 0.05  # divisor of similarities
    both_directions: bool = False  # True where a positive must find its anchor among all anchors, too
    widths: tuple[int, ...] = ()  # first dimensions that have the loss, too, beside all D (Matryoshka)


def embedding_objective(settings):
    """The objective of `LossSettings`: its `loss` is the mean over rows, or CoSENT's of the whole step."""
    is_ranking = settings.kind == RANKING
    return Objective(
        head=EMBEDDING,
        features=(*SEQUENCES, PLACES, TEXT_IDS, *(() if is_ranking else (SCORES,))),
        outputs={"hidden_states": "S"},
        sums=functools.partial(embedding_sums, settings=settings),
        counts=functools.partial(embedding_counts, num_texts=settings.num_texts),
        losses={"loss": "num_rows"},
        accuracies={"accuracy": ("correct", "num_rows")} if is_ranking else {},
        skips_empty=True,
        vectors=functools.partial(pool_outputs, pooling=settings.pooling),
    )


def pool_outputs(outputs, batch, pooling):
    """The vector of each sequence: float32 `[B, K, D]`; see `pool_sequences`."""
    names = ("sequence_ids", "cls_positions")
    return pool_sequences(outputs["hidden_states"], *(batch[name] for name in names), pooling)


def embedding_counts(batch, num_texts):
    """`num_rows`, counted at their first texts, and `count_sequences`."""
    places_BK = batch["places"]
    is_first_BK = ops.logical_and(places_BK > 0, ops.equal(places_BK % num_texts, 1 % num_texts))
    return {"num_rows": ops.sum(ops.cast(is_first_BK, "float32")), **count_sequences(batch)}


def embedding_sums(outputs, batch, settings):
    """`loss` and for rankings `correct`, sums over N rows, from `vectors` `[B, K, D]` of a whole step."""
    vectors_NRD = by_place(outputs["vectors"], batch["places"], settings)
    ids_NR = by_place(batch["text_ids"][..., None], batch["places"], settings)[..., 0]
    total, right = 0.0, 0.0
    # All D, too: export and scores are of these
    widths = sorted({*settings.widths, vectors_NRD.shape[-1]}, reverse=True)
    for number, width in enumerate(widths):
        part_NRD = vectors_NRD[..., :width]
        if settings.normalize:
            part_NRD = normalized(part_NRD)
        if settings.kind == COSENT:
            scores_N = by_place(batch["scores"][..., None], batch["places"], settings)[:, 0, 0]
            loss = cosent(part_NRD, scores_N, settings.temperature) * settings.batch_size
        else:
            loss, found = ranking(part_NRD, ids_NR, settings.temperature, settings.both_directions)
            right = right if number else found  # the first is the widest
        total = total + loss
    return {"loss": total, **({"correct": right} if settings.kind == RANKING else {})}


def by_place(values_BKX, places_BK, settings):
    """Values of slots in the order of the step's rows: `[N, R, X]`.

    places [[3 1] [0 4] [2 0]], values [[c a] [. d] [b .]], R=2   ->   [[a b] [c d]]
    """
    flat_TX = ops.reshape(values_BKX, (-1, values_BKX.shape[-1]))
    size = settings.batch_size * settings.num_texts
    # One slot has each place; unused ones add up at 0, which is cut off
    found_QX = ops.segment_sum(flat_TX, ops.cast(ops.reshape(places_BK, (-1,)), "int32"), size + 1)[1:]
    return ops.reshape(found_QX, (settings.batch_size, settings.num_texts, -1))


def normalized(vectors):
    """Vectors of length 1, and of a zero vector zeros."""
    squares = ops.sum(ops.square(vectors), axis=-1, keepdims=True)
    return vectors * ops.rsqrt(ops.maximum(squares, 1e-24))


def ranking(vectors_NRD, ids_NR, temperature, both_directions):
    """Multiple-negatives ranking: the loss of each anchor's positive among all texts that are no anchors.

    No negative is a candidate that is the text of the anchor or of its positive again, or the positive of an
    equal anchor. Returns sums over the N anchors of the loss, with `both_directions` its mean with that of
    positives among all anchors, and of 1 where no candidate is more similar than the positive.

    Source: "Efficient Natural Language Response Suggestion for Smart Reply" (Henderson et al. 2017), Section
    4.4; both directions as in "Learning Transferable Visual Models From Natural Language Supervision".
    """
    candidates_CD = ops.reshape(ops.swapaxes(vectors_NRD[:, 1:], 0, 1), (-1, vectors_NRD.shape[-1]))
    ids_C = ops.reshape(ops.swapaxes(ids_NR[:, 1:], 0, 1), (-1,))  # positives of all rows first
    nll_N, right_N = _ranked(vectors_NRD[:, 0], candidates_CD, ids_NR[:, 0], ids_C, temperature)
    loss = ops.sum(nll_N)
    if both_directions:
        backward_N, _ = _ranked(vectors_NRD[:, 1], vectors_NRD[:, 0], ids_NR[:, 1], ids_NR[:, 0], temperature)
        loss = (loss + ops.sum(backward_N)) / 2
    return loss, ops.sum(right_N)


def _ranked(queries_ND, candidates_CD, ids_N, ids_C, temperature):
    """Loss, and 1 for a right answer, of queries whose answers are the first N candidates, in order."""
    number, num_candidates = ids_N.shape[0], ids_C.shape[0]
    similar_NC = ops.matmul(queries_ND, ops.transpose(candidates_CD)) / temperature
    answers_N = ops.arange(number, dtype="int32")
    is_answer_NC = ops.equal(answers_N[:, None], ops.arange(num_candidates, dtype="int32"))
    # The query that a candidate answers; hard negatives answer none, -1
    answered_C = ops.pad(ids_N, (0, num_candidates - number), constant_values=-1)
    is_right_NC = ops.equal(ids_C[:number, None], ids_C) | ops.equal(ids_N[:, None], answered_C)
    is_masked_NC = is_right_NC | ops.equal(ids_N[:, None], ids_C)
    return nll_and_right(ops.where(is_masked_NC & ~is_answer_NC, MASKED, similar_NC), answers_N)


def cosent(vectors_N2D, scores_N, temperature):
    """CoSENT, a scalar: log of 1 plus the sum over s_i < s_j of e to (cos_i - cos_j) / temperature.

    Source: Su, "CoSENT: A more efficient sentence vector scheme than Sentence-BERT" (2022).
    """
    similar_N = ops.sum(vectors_N2D[:, 0] * vectors_N2D[:, 1], axis=-1) / temperature
    differences_NN = similar_N[:, None] - similar_N
    kept_NN = ops.where(scores_N[:, None] < scores_N, differences_NN, MASKED)
    return ops.logsumexp(ops.concatenate([ops.zeros((1,)), ops.reshape(kept_NN, (-1,))]))
