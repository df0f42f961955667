"""Scores of vectors: Spearman's correlation of similarities, and ranks of documents for queries.

Legend: n texts, D width.
"""

import dataclasses

import numpy as np
from scipy.stats import spearmanr

from bert_packed.checkpoints.sentence_transformers import unit
from bert_packed.core.settings import InputError
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.retrieval import Retrieval, find_qrels, read_retrieval
from bert_packed.tasks.rows import source_files

SPEARMAN = "spearman"


@dataclasses.dataclass(frozen=True)
class ScoredPairs:
    """Pairs of texts with scores."""

    path: str
    sentences: tuple[list[str], list[str]]
    scores: np.ndarray

    names = (SPEARMAN,)

    def __str__(self):
        return f"{self.path}: pairs {len(self.scores):,}"

    @property
    def files(self):
        """The files that it was read from: list of str."""
        return source_files(self.path)

    def score(self, encode):
        """100 times Spearman's correlation of cosines with the scores, by `encode(texts, is_query)`."""
        # Both are sentences: neither is a query
        one, other = (unit(encode(texts, None)) for texts in self.sentences)
        return {SPEARMAN: 100 * float(spearmanr(np.sum(one * other, axis=1), self.scores).statistic)}


@dataclasses.dataclass(frozen=True)
class Search:
    """Queries that find documents by their vectors."""

    retrieval: Retrieval

    names = Retrieval.names

    def __str__(self):
        return str(self.retrieval)

    @property
    def files(self):
        return self.retrieval.files

    def score(self, encode):
        """See `Retrieval.score`."""
        of = self.retrieval
        documents = unit(encode(list(of.documents.values()), False))
        queries = unit(encode([of.queries[name] for name in of.relevant], True))
        ids = list(of.documents)
        found = zip(of.relevant, queries, strict=True)
        return of.score([of.best(query, ids, documents @ vector) for query, vector in found])


def read_evaluation(path):
    """`ScoredPairs` of a file, or the `Search` of `retrieval.find_qrels`; raises `InputError`."""
    if qrels := find_qrels(path):
        return Search(read_retrieval(qrels))
    rows = read_rows(path)
    if rows.scores is None:
        raise InputError(f"{path} must have sentence1, sentence2 and score. Received: no scores.")
    if len(rows) < 2 or np.ptp(rows.scores) == 0:
        raise InputError(f"{path} must have two scores that differ. Received: {len(rows)} rows.")
    return ScoredPairs(str(path), tuple(rows.texts), rows.scores)
