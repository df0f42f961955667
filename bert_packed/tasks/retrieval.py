"""Queries, documents, and which answer which, in BEIR's form; scores of ranked documents."""

import dataclasses
from pathlib import Path

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_text
from bert_packed.tasks.rows import check_text, json_rows

DEPTH, RECALLS = 10, (10, 100)
CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"


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

    @property
    def files(self):
        """The files that it was read from: list of str."""
        folder = Path(self.path).parent.parent
        return [self.path, str(folder / CORPUS), str(folder / QUERIES)]

    def best(self, query, ids, similar):
        """The ids of the most similar documents of `ids`, in order; `similar` is a float array `[len(ids)]`.

        As in BEIR, a query that is a document does not find itself.
        """
        # Equal similarities go by the order of the documents
        order = np.argsort(-similar, kind="stable")[: max(DEPTH, *RECALLS) + 1]
        return [ids[place] for place in order if ids[place] != query]

    def score(self, ranked):
        """100 times the mean over queries of nDCG, reciprocal rank and recall: dict of float by `names`.

        `ranked` has the `best` documents of each query of `relevant`, in its order.
        """
        rows = [
            _score_query([gains.get(name, 0.0) for name in found], gains.values())
            for found, gains in zip(ranked, self.relevant.values(), strict=True)
        ]
        return dict(zip(self.names, (100 * np.mean(rows, axis=0)).tolist(), strict=True))


def _score_query(found, gains):
    """nDCG, reciprocal rank and recalls of a query, from the gains of its documents in order and of all."""
    gains = [gain for gain in gains if gain > 0]
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    best = sorted(gains, reverse=True)[:DEPTH]
    ndcg = np.dot(found[:DEPTH], discounts[: len(found[:DEPTH])]) / np.dot(best, discounts[: len(best)])
    ranks = [rank for rank, gain in enumerate(found[:DEPTH], 1) if gain > 0]
    recalls = [sum(gain > 0 for gain in found[:depth]) / len(gains) for depth in RECALLS]
    return [ndcg, 1 / ranks[0] if ranks else 0.0, *recalls]


def find_qrels(path):
    """The file of qrels that a path names, or of a folder in BEIR's form; None for other paths.

    In a folder it is dev.tsv, else test.tsv, else the first.
    """
    folder = Path(path)
    if (folder / CORPUS).is_file():
        files = sorted(folder.glob("qrels/*.tsv"))
        # A checkpoint that is chosen by the test set is better there than on other queries
        chosen = [file for stem in ("dev", "test") for file in files if file.stem == stem] or files
        if not chosen:
            raise InputError(f"{folder} must have qrels/*.tsv. Received: none.")
        return chosen[0]
    is_one = folder.suffix == ".tsv" and (folder.parent.parent / CORPUS).is_file()
    return folder if is_one else None


def read_retrieval(qrels):
    """The `Retrieval` of a file of qrels, with the corpus and the queries beside its folder."""
    folder = Path(qrels).parent.parent
    documents, queries = _by_id(folder / CORPUS), _by_id(folder / QUERIES)
    relevant = {}
    for query, document, gain in qrel_rows(qrels, queries, documents):
        if gain > 0:
            relevant.setdefault(query, {})[document] = gain
    if not relevant:
        raise InputError(f"{qrels} must have a score above 0. Received: none.")
    return Retrieval(str(qrels), documents, queries, relevant)


def qrel_rows(path, queries, documents):
    """Yield query, document and score of each line below a header; `InputError` where one is not known."""
    header, *lines = read_text(path).splitlines() or [""]
    if header.rpartition("\t")[2].strip().isdecimal():
        raise InputError(f"{path} must begin with a header. Received: {header[:80]!r}.")
    for number, line in enumerate(lines, 2):
        parts = line.split("\t")
        try:
            query, document, gain = parts[0], parts[1], float(parts[2])
            if not np.isfinite(gain):
                raise ValueError
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{path}, line {number}: must be query, document and score. Received: {line[:80]!r}."
            ) from error
        for name, known, what in ((query, queries, QUERIES), (document, documents, CORPUS)):
            if name not in known:
                raise InputError(f"{path}, line {number}: {what} must have it. Received: {name!r}.")
        yield query, document, gain


def _by_id(path):
    """Texts of a file by their ids: dict."""
    found = {}
    for number, row in json_rows(path):
        title = row.get("title") or ""
        text = row.get("text") if not title else f"{title} {row.get('text') or ''}".strip()
        name = check_text(path, number, "_id", row.get("_id"))
        if name in found:
            raise InputError(f"{path}, row {number}: each _id must be there once. Received: {name!r} again.")
        found[name] = check_text(path, number, "text", text)
    return found
