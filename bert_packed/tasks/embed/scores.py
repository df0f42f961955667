"""Scores of vectors: Spearman's correlation of similarities, and ranks of documents for queries."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from scipy.stats import spearmanr

from bert_packed.checkpoints.sentence_transformers import unit
from bert_packed.core.settings import InputError
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.retrieval import find_qrels, read_retrieval
from bert_packed.tasks.rows import source_files

SPEARMAN = "spearman"


@dataclasses.dataclass(frozen=True)
class VectorScores:
    """How the vectors of a file's texts are scored."""

    description: str
    names: tuple[str, ...]
    files: list[str]  # that were read
    # It takes `encode`, a function of texts and `is_query` to vectors, and returns a dict of float by `names`
    score: Callable


def read_evaluation(path):
    """The `VectorScores` of a file of scored pairs, or of `retrieval.find_qrels`; raises `InputError`."""
    if qrels := find_qrels(path):
        retrieval = read_retrieval(qrels)
        score = functools.partial(_score_search, retrieval)
        return VectorScores(str(retrieval), retrieval.names, retrieval.files, score)
    rows = read_rows(path)
    if rows.scores is None:
        raise InputError(f"{path} must have sentence1, sentence2 and score. Received: no scores.")
    if len(rows) < 2 or np.ptp(rows.scores) == 0:
        raise InputError(f"{path} must have two scores that differ. Received: {len(rows)} rows.")
    score = functools.partial(_score_pairs, rows)
    return VectorScores(f"{path}: pairs {len(rows):,}", (SPEARMAN,), source_files(path), score)


def _score_pairs(rows, encode):
    """100 times Spearman's correlation of cosines with the scores."""
    # Both are sentences: neither is a query
    one, other = (unit(encode(texts, None)) for texts in rows.texts)
    return {SPEARMAN: 100 * float(spearmanr(np.sum(one * other, axis=1), rows.scores).statistic)}


def _score_search(retrieval, encode):
    """See `Retrieval.score`."""
    documents = unit(encode(list(retrieval.documents.values()), False))
    queries = unit(encode([retrieval.queries[name] for name in retrieval.relevant], True))
    ids, found = list(retrieval.documents), zip(retrieval.relevant, queries, strict=True)
    return retrieval.score([retrieval.best(query, ids, documents @ vector) for query, vector in found])
