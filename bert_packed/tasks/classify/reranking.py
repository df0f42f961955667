"""Documents that a model of pairs ranks for queries: nDCG as for vectors, in BEIR's form."""

import dataclasses

import numpy as np

from bert_packed.core.progress import count_of
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_text
from bert_packed.tasks.classify.labels import Examples
from bert_packed.tasks.retrieval import Retrieval, qrel_rows, read_retrieval

RANKING_FILE = "ranking.tsv"


@dataclasses.dataclass(frozen=True)
class Reranking:
    """Queries, and the documents to rank for each."""

    retrieval: Retrieval
    candidates: dict[str, list[str]]  # query to documents, in the order of `retrieval.relevant`

    names = Retrieval.names

    @property
    def examples(self):
        """A pair of query and document for each candidate: `Examples`."""
        of, pairs = self.retrieval, [(query, name) for query, ids in self.candidates.items() for name in ids]
        columns = [[of.queries[query] for query, _ in pairs], [of.documents[name] for _, name in pairs]]
        return Examples(of.path, columns, None, rows=range(1, len(pairs) + 1))

    def score(self, logits):
        """See `Retrieval.score`; `logits` float `[n, 1]` of the pairs, higher for better answers."""
        of, parts = self.retrieval, self._by_query(logits)
        return of.score([of.best(query, ids, part) for (query, ids), part in parts])

    def write(self, logits, folder):
        """Write `ranking.tsv`: query, document and value of every candidate, the best first."""
        lines = ["query-id\tcorpus-id\tscore\n"]
        for (query, ids), part in self._by_query(logits):
            order = np.argsort(-part, kind="stable")
            lines += [f"{query}\t{ids[place]}\t{part[place]:.6g}\n" for place in order]
        write_text(str(folder / RANKING_FILE), "".join(lines))
        print(f"ranked     {count_of(len(logits), 'document')} for {len(self.candidates):,} queries")

    def _by_query(self, logits):
        ends = np.cumsum([len(ids) for ids in self.candidates.values()])
        return zip(self.candidates.items(), np.split(logits[:, 0], ends[:-1]), strict=True)


def read_reranking(qrels, candidates_file=""):
    """The `Reranking` of a file of qrels.

    `candidates_file` has the documents to rank for each query, in the form of qrels, whatever their scores;
    "" is for all documents. A document that is no candidate is not found.
    """
    retrieval = read_retrieval(qrels)
    if not candidates_file:
        return Reranking(retrieval, {query: list(retrieval.documents) for query in retrieval.relevant})
    found = {query: {} for query in retrieval.relevant}
    for query, document, _ in qrel_rows(candidates_file, retrieval.queries, retrieval.documents):
        if query in found:  # others have no answers to score
            found[query][document] = None
    if not any(found.values()):
        raise InputError(f"{candidates_file} must have a document for a query of {qrels}. Received: none.")
    return Reranking(retrieval, {query: list(ids) for query, ids in found.items()})
