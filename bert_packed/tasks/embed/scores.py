"""Scores of vectors: Spearman's correlation of similarities, and ranks of documents for queries.

Legend: n texts, D width.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from bert_packed.core.settings import InputError
from bert_packed.tasks.embed.files import read_rows

DEPTH, RECALLS = 10, (10, 100)
SPEARMAN = "spearman"


@dataclasses.dataclass(frozen=True)
class ScoredPairs:
    """Pairs of texts with scores."""

    sentences: tuple[list[str], list[str]]
    scores: np.ndarray

    names = (SPEARMAN,)

    def score(self, encode):
        """100 times Spearman's correlation of cosines with the scores, by `encode(texts, is_query)`."""
        # Both are sentences: neither is a query
        one, other = (unit(encode(texts, None)) for texts in self.sentences)
        return {SPEARMAN: 100 * float(spearmanr(np.sum(one * other, axis=1), self.scores).statistic)}


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """Queries, documents, and which documents answer which queries."""

    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, float]]  # query to document to gain

    names = (f"ndcg@{DEPTH}", f"mrr@{DEPTH}", *(f"recall@{depth}" for depth in RECALLS))

    def score(self, encode):
        """100 times the mean over queries of nDCG, reciprocal rank and recall."""
        ids = list(self.documents)
        documents = unit(encode(list(self.documents.values()), False))
        queries = unit(encode([self.queries[name] for name in self.relevant], True))
        most = min(max(DEPTH, *RECALLS), len(ids))
        rows = []
        for vector, gains in zip(queries, self.relevant.values(), strict=True):
            similar = documents @ vector
            # Equal similarities go by the order of the corpus
            best = np.argsort(-similar, kind="stable")[:most]
            rows.append(_of_query([gains.get(ids[place], 0.0) for place in best], gains.values()))
        return dict(zip(self.names, 100 * np.mean(rows, axis=0), strict=True))


def _of_query(found, gains):
    """nDCG, reciprocal rank and recalls of a query, from the gains of its documents in order and of all."""
    gains = [gain for gain in gains if gain > 0]
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    best = sorted(gains, reverse=True)[:DEPTH]
    ndcg = np.dot(found[:DEPTH], discounts[: len(found[:DEPTH])]) / np.dot(best, discounts[: len(best)])
    ranks = [rank for rank, gain in enumerate(found[:DEPTH], 1) if gain > 0]
    recalls = [sum(gain > 0 for gain in found[:depth]) / len(gains) for depth in RECALLS]
    return [ndcg, 1 / ranks[0] if ranks else 0.0, *recalls]


def unit(vectors):
    """Vectors `[n, D]` of length 1; a zero vector stays."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def read_evaluation(path):
    """`ScoredPairs` of a file, or the `Retrieval` of a folder in BEIR's form; raises `InputError`."""
    folder = Path(path)
    if (folder / "corpus.jsonl").is_file():
        return _read_beir(folder)
    rows = read_rows(path)
    if rows.scores is None:
        raise InputError(f"{path} must have sentence1, sentence2 and score. Received: no scores.")
    if len(rows) < 2 or np.ptp(rows.scores) == 0:
        raise InputError(f"{path} must have two scores that differ. Received: {len(rows)} rows.")
    return ScoredPairs(tuple(rows.texts), rows.scores)


def _read_beir(folder):
    documents = {
        name: " ".join(filter(None, (row.get("title"), row.get("text"))))
        for name, row in _by_id(folder / "corpus.jsonl")
    }
    queries = {name: row.get("text", "") for name, row in _by_id(folder / "queries.jsonl")}
    paths = sorted(folder.glob("qrels/*.tsv"))
    test = [path for path in paths if path.stem in ("dev", "test")][:1] or paths[:1]
    if not test:
        raise InputError(f"{folder} must have qrels/*.tsv. Received: none.")
    relevant = {}
    lines = test[0].read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[1:], 2):
        parts = line.split("\t")
        try:
            query, document, gain = parts[0], parts[1], float(parts[2])
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{test[0]}, line {number}: must be query, document and score. Received: {line[:80]!r}."
            ) from error
        for name, known, what in ((query, queries, "queries.jsonl"), (document, documents, "corpus.jsonl")):
            if name not in known:
                raise InputError(f"{test[0]}, line {number}: {what} must have it. Received: {name!r}.")
        if gain > 0:
            relevant.setdefault(query, {})[document] = gain
    if not relevant:
        raise InputError(f"{test[0]} must have a score above 0. Received: none.")
    return Retrieval(documents, queries, relevant)


def _by_id(path):
    if not path.is_file():
        raise InputError(f"{path} must exist. Received: no such file.")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield row["_id"], row
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise InputError(
                    f"{path}, line {number}: must be JSON with _id. Received: {line[:80]!r}."
                ) from error
