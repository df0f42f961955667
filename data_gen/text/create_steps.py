"""Steps of making records from text, each in bounded memory and in any process.

A split's (duplicate, document) pairs (`sources.py`) are shuffled by the seed and divided into
shards. A shard's bytes depend only on the corpus, its range of pairs and the seed, not on the process that
writes it.
"""

import dataclasses

import numpy as np

from bert_packed.core import progress, storage
from bert_packed.packing import histogram as histograms
from bert_packed.records.inputs import unchanged
from bert_packed.records.provenance import DOCUMENT_COLUMNS, write_traced
from bert_packed.text import tokenization
from data_gen.text.sources import load_passes, shuffled_pairs
from data_gen.text.text_records import BertRecords, CausalRecords
from data_gen.text.token_corpus import join_corpora, open_corpus, write_corpus

SPLITS = ("train", "eval")
WRITE_BATCH = 1024  # sequences encoded at once; 1024 of S=512 take about 12 MB
SHUFFLE_TOKENS = 2**21  # tokens of sequences that are shuffled together: some thousand sequences of S=512
PAIRS_AT_ONCE = 256  # drawn together; among these, in the order of passes
SEQUENCES_PER_RELEASE = 256  # touched pages of the corpus count as memory until they are released

# This is the fifth number of a random key, as in `sources.py`. Keys of documents have four, so none collide
SHUFFLE_SHARD = 1


@dataclasses.dataclass(frozen=True)
class Text:
    """One or several files, or the embedded corpus."""

    name: str  # path, or the name of the embedded corpus
    documents: object  # repeatable iterable of (document number, text); picklable
    stamps: list  # those of its files (`records/inputs.py`); empty for the embedded corpus
    size: int  # bytes, or characters of the embedded corpus
    sha256: str | None = None  # that of the embedded corpus; `tokenize` computes those of files


@dataclasses.dataclass(frozen=True)
class TokenizeWork:
    """Argument of `tokenize`."""

    records: BertRecords | CausalRecords
    text: Text
    file_index: int  # counts from 0
    vocab_path: str
    folder: str  # receives the columns


@dataclasses.dataclass(frozen=True)
class Shard:
    """Argument of `write_shard`."""

    path: str
    provenance: str  # path of its provenance index; "" for none
    corpus_dir: str  # has the documents of the split
    vocab_path: str
    split: str
    index: int  # number in its split
    first: int  # the shard's range of the split's pairs
    last: int
    seed: int  # the run's
    records: BertRecords | CausalRecords


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Numbered sentences as a repeatable iterable of lists of sentences."""

    documents: object

    def __iter__(self):
        for batch in tokenization.batches(self.documents):
            yield [sentence for _, sentence in batch]


def train_vocabulary(work):
    """Train and write a vocabulary, from (`WordPieces` or `ByteBpe`, `Text`, path)."""
    vocabulary, text, path = work
    with storage.write_whole(path) as partial, unchanged(text.stamps):
        vocabulary.train(_Texts(text.documents), partial)


def tokenize(work):
    """Tokenize documents into a folder; `num_documents` are those with a token."""
    text = work.text
    storage.make_folder(work.folder)
    with unchanged(text.stamps):
        pieces = work.records.encode(text.documents, work.vocab_path)
        num_documents = write_corpus(pieces, work.records.layout, work.folder, work.file_index)
        # the checksum is of the content read, since the file is unchanged
        checksum = text.sha256 or storage.file_sha256(text.name)
    return {"sha256": checksum, "num_documents": num_documents}


def join(work):
    """Join tokenized folders, (list of folders, layout, folder), into one."""
    storage.make_folder(work[-1])
    join_corpora(*work)


def write_shard(shard):
    """Make the sequences of a shard, shuffle them locally, and write its file."""
    split_index = SPLITS.index(shard.split)
    records = shard.records
    corpus = open_corpus(shard.corpus_dir, records.layout)
    histogram = np.zeros(records.max_seq_length, np.int64)
    counts = dict.fromkeys(records.counted, 0)

    def serialize(index):
        for number, batch in enumerate(_draw_batches(shard, corpus, split_index, counts)):
            origins, drawn = zip(*batch, strict=True)
            sequences = records.collect(drawn, counts)
            key = (shard.seed, split_index, number, shard.index, SHUFFLE_SHARD)
            order = np.random.default_rng(key).permutation(len(sequences))
            if index is not None:
                duplicates, documents = np.array(origins, np.int64)[order].T
                index.add(
                    file_indices=corpus.document_files[documents],
                    document_numbers=corpus.document_numbers[documents],
                    duplicates=duplicates,
                )
            histogram[:] += histograms.count_lengths(sequences["lengths"], records.max_seq_length)
            for start in range(0, len(order), WRITE_BATCH):
                yield from records.serialize(sequences, order[start : start + WRITE_BATCH])

    entry = write_traced(shard.path, shard.provenance, DOCUMENT_COLUMNS, serialize)
    return {"entry": entry.to_json(), "histogram": histogram.tolist(), "counts": counts}


def _draw_batches(shard, corpus, split_index, counts):
    """Yield lists, of about `SHUFFLE_TOKENS` each, of drawn sequences.

    A sequence is (duplicate, document), and what `collect` takes, of which the first entry is the tokens.
    """
    passes = load_passes(shard.corpus_dir, shard.split)

    def read_groups():
        for first in range(shard.first, shard.last, PAIRS_AT_ONCE):
            last = min(first + PAIRS_AT_ONCE, shard.last)
            yield from shuffled_pairs(first, last, passes, shard.seed, split_index)
            progress.advance(last - first)

    held, num_tokens = [], 0
    drawn = shard.records.draw(corpus, read_groups(), shard.vocab_path, shard.seed, split_index, counts)
    for number, (origin, instance) in enumerate(drawn, 1):
        if number % SEQUENCES_PER_RELEASE == 0:
            corpus.release()
        held.append((origin, instance))
        num_tokens += len(instance[0])
        if num_tokens >= SHUFFLE_TOKENS:
            yield held
            held, num_tokens = [], 0
    if held:
        yield held
