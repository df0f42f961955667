"""Scores of vectors: Spearman's correlation of similarities, and ranks of documents for queries.

Legend: n texts, D width.
"""

import dataclasses
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from bert_packed.checkpoints.sentence_transformers import unit
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_text
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.rows import check_text, json_rows

DEPTH, RECALLS = 10, (10, 100)
SPEARMAN = "spearman"
CORPUS = "corpus.jsonl"


@dataclasses.dataclass(frozen=True)
class ScoredPairs:
    """Pairs of texts with scores."""

    path: str
    sentences: tuple[list[str], list[str]]
    scores: np.ndarray

    names = (SPEARMAN,)

    def __str__(self):
        return f"{self.path}: pairs {len(self.scores):,}"

    def score(self, encode):
        """100 times Spearman's correlation of cosines with the scores, by `encode(texts, is_query)`."""
        # Both are sentences: neither is a query
        one, other = (unit(encode(texts, None)) for texts in self.sentences)
        return {SPEARMAN: 100 * float(spearmanr(np.sum(one * other, axis=1), self.scores).statistic)}


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """Queries, documents, and which documents answer which queries."""

    path: str  # of the qrels: a folder may have several
    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, float]]  # query to document to gain

    names = (f"ndcg@{DEPTH}", f"mrr@{DEPTH}", *(f"recall@{depth}" for depth in RECALLS))

    def __str__(self):
        return f"{self.path}: queries {len(self.relevant):,}, documents {len(self.documents):,}"

    def score(self, encode):
        """100 times the mean over queries of nDCG, reciprocal rank and recall."""
        ids = list(self.documents)
        places = {name: place for place, name in enumerate(ids)}
        documents = unit(encode(list(self.documents.values()), False))
        queries = unit(encode([self.queries[name] for name in self.relevant], True))
        most = min(max(DEPTH, *RECALLS), len(ids))
        rows = []
        for vector, (query, gains) in zip(queries, self.relevant.items(), strict=True):
            similar = documents @ vector
            if query in self.documents:  # as in BEIR: a question that is a document does not find itself
                similar[places[query]] = -np.inf
            # Equal similarities go by the order of the corpus
            best = np.argsort(-similar, kind="stable")[:most]
            found = [gains.get(ids[place], 0.0) for place in best if ids[place] != query]
            rows.append(_of_query(found, gains.values()))
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


def read_evaluation(path):
    """`ScoredPairs` of a file, or the `Retrieval` of a folder in BEIR's form; raises `InputError`.

    A file of such a folder's qrels may be named; of a folder it is dev.tsv, else test.tsv, else the first.
    """
    folder = Path(path)
    if (folder / CORPUS).is_file():
        files = sorted(folder.glob("qrels/*.tsv"))
        # A checkpoint that is chosen by the test set is better there than on other queries
        chosen = [file for stem in ("dev", "test") for file in files if file.stem == stem] or files
        if not chosen:
            raise InputError(f"{folder} must have qrels/*.tsv. Received: none.")
        return _read_beir(folder, chosen[0])
    if folder.suffix == ".tsv" and (folder.parent.parent / CORPUS).is_file():
        return _read_beir(folder.parent.parent, folder)
    rows = read_rows(path)
    if rows.scores is None:
        raise InputError(f"{path} must have sentence1, sentence2 and score. Received: no scores.")
    if len(rows) < 2 or np.ptp(rows.scores) == 0:
        raise InputError(f"{path} must have two scores that differ. Received: {len(rows)} rows.")
    return ScoredPairs(str(path), tuple(rows.texts), rows.scores)


def _read_beir(folder, qrels):
    documents, queries = _by_id(folder / CORPUS), _by_id(folder / "queries.jsonl")
    relevant = {}
    lines = read_text(qrels).splitlines()
    for number, line in enumerate(lines[1:], 2):
        parts = line.split("\t")
        try:
            query, document, gain = parts[0], parts[1], float(parts[2])
            if not np.isfinite(gain):
                raise ValueError
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{qrels}, line {number}: must be query, document and score. Received: {line[:80]!r}."
            ) from error
        for name, known, what in ((query, queries, "queries.jsonl"), (document, documents, CORPUS)):
            if name not in known:
                raise InputError(f"{qrels}, line {number}: {what} must have it. Received: {name!r}.")
        if gain > 0:
            relevant.setdefault(query, {})[document] = gain
    if not relevant:
        raise InputError(f"{qrels} must have a score above 0. Received: none.")
    return Retrieval(str(qrels), documents, queries, relevant)


def _by_id(path):
    """Texts of a file by their ids: dict."""
    found = {}
    if not path.is_file():
        raise InputError(f"{path} must exist. Received: no such file.")
    for number, row in json_rows(path):
        title = row.get("title") or ""
        text = row.get("text") if not title else f"{title} {row.get('text') or ''}".strip()
        name = check_text(path, number, "_id", row.get("_id"))
        if name in found:
            raise InputError(f"{path}, row {number}: each _id must be there once. Received: {name!r} again.")
        found[name] = check_text(path, number, "text", text)
    return found
