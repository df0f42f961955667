"""What the steps of making records from text do, each in bounded memory and by any process.

A split's (duplicate, document) pairs (`passes.py`) are shuffled by the seed and cut into shards. A shard's
bytes follow from the corpus, its range of the pairs and the seed alone, whoever writes it.
"""

import dataclasses
from itertools import chain

import numpy as np

from bert_packed.core import progress, storage
from bert_packed.packing import histogram as histograms
from bert_packed.records.inputs import unchanged
from bert_packed.records.provenance import DOCUMENT_COLUMNS, write_traced
from bert_packed.text import tokenization
from data_gen.text.passes import load_passes, shuffled_pairs
from data_gen.text.text_records import TextRecords
from data_gen.text.token_corpus import open_origins

SPLITS = ("train", "eval")
WRITE_BATCH = 1024  # sequences encoded at once; 1024 of S=512 take about 12 MB
SHUFFLE_TOKENS = 2**21  # sequences are shuffled among about so many tokens: some thousand of S=512
# Pages of the corpus that are touched count as memory until it is mapped anew, or they are given back
PAIRS_PER_MAPPING = 256
SEQUENCES_PER_RELEASE = 256  # of any document: one may be as large as the corpus

# Fifth number of a random key, as those in `passes.py`. Documents draw from keys of four: they never meet.
SHUFFLE_SHARD = 1


@dataclasses.dataclass(frozen=True)
class TokenizeWork:
    """Tokenize some documents.

    Attributes:
        records: What they are for.
        documents: Iterable of (number of the document, text), and can be pickled.
        stamps: List of what `stamp_files` found: the files that they are read from; at most one.
        vocab_path: The vocabulary.
        folder: Where the arrays go.
    """

    records: TextRecords
    documents: object
    stamps: list
    vocab_path: str
    folder: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to write, described so that any process can.

    Attributes:
        path: Where to.
        provenance: Path of the index of its documents; "" for none.
        corpus_dir: Folder with the corpus and the documents of the split.
        vocab_path: Vocabulary.
        split: Name of the split.
        index: Number of the shard within its split.
        first, last: The shard's range of the split's pairs.
        passes: Over the documents of the split: what `save_passes` told.
        seed: The run's seed.
        records: What documents become.
    """

    path: str
    provenance: str
    corpus_dir: str
    vocab_path: str
    split: str
    index: int
    first: int
    last: int
    passes: list[list[int]]
    seed: int
    records: TextRecords


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Numbered sentences as lists of sentences, made anew each time they are iterated."""

    documents: object

    def __iter__(self):
        for batch in tokenization.batches(self.documents):
            yield [sentence for _, sentence in batch]


def train_vocabulary(work):
    """Train a vocabulary, (`VocabularyKind`, documents, stamps of their files, path), and write it."""
    vocabulary, documents, stamps, path = work
    with storage.write_whole(path) as partial, unchanged(stamps):
        vocabulary.train(_Texts(documents), partial)


def tokenize(work):
    """Tokenize documents into a folder.

    Returns:
        Dict: `num_documents`, those that have a token; `sha256` of their file, None without one.

    Raises:
        InputError: the text cannot be used, or the file changes meanwhile.
    """
    storage.make_folder(work.folder)
    with unchanged(work.stamps):
        num_documents = work.records.tokenize(work.documents, work.vocab_path, work.folder)
        # with the block's promise: of what was read
        checksums = [storage.file_sha256(path) for path, _, _ in work.stamps]
    return {"num_documents": num_documents, "sha256": checksums[0] if checksums else None}


def join(work):
    """Join tokenized folders, (`TextRecords`, list of folders, folder), into one."""
    records, parts, folder = work
    storage.make_folder(folder)
    records.join(parts, folder)


def write_shard(shard):
    """Make the sequences of a shard, shuffled among their neighbours, and write its file.

    Returns:
        Dict: `entry`, of the file for the manifest; `histogram` of the lengths, list `[S]`; and `counts`,
        dict of numbers that shards add up, those of `TextRecords.new_counts`.
    """
    split_index = SPLITS.index(shard.split)
    records = shard.records
    histogram = np.zeros(records.max_seq_length, np.int64)
    counts = records.new_counts()

    def serialize(index):
        for number, (sequences, its_origins) in enumerate(_draw_batches(shard, split_index, counts)):
            key = (shard.seed, split_index, number, shard.index, SHUFFLE_SHARD)
            order = np.random.default_rng(key).permutation(len(sequences))
            if index is not None:
                duplicates, documents = np.array(its_origins, np.int64)[order].T
                text_files, numbers = open_origins(shard.corpus_dir)  # anew: see PAIRS_PER_MAPPING
                index.add(
                    file_indices=text_files[documents],
                    document_numbers=numbers[documents],
                    duplicates=duplicates,
                )
            histogram[:] += histograms.count_lengths(sequences["lengths"], records.max_seq_length)
            for start in range(0, len(order), WRITE_BATCH):
                yield from records.serialize(sequences, order[start : start + WRITE_BATCH])

    entry = write_traced(shard.path, shard.provenance, DOCUMENT_COLUMNS, serialize)
    return {"entry": entry.to_json(), "histogram": histogram.tolist(), "counts": counts}


def _draw_batches(shard, split_index, counts):
    """Yield sequences of about `SHUFFLE_TOKENS`, and (duplicate, document) of each; count what they hold."""
    records = shard.records
    passes = load_passes(shard.corpus_dir, shard.split, shard.passes)
    vocabulary = records.load(shard.vocab_path)
    held, origins, num_tokens = [], [], 0
    for first in range(shard.first, shard.last, PAIRS_PER_MAPPING):
        last = min(first + PAIRS_PER_MAPPING, shard.last)
        corpus = records.open_corpus(shard.corpus_dir)
        drawn = [
            records.draw(corpus, pairs, documents, vocabulary, shard.seed, split_index, counts)
            for pairs, documents in shuffled_pairs(first, last, passes, shard.seed, split_index)
        ]
        for number, (origin, instance) in enumerate(chain.from_iterable(drawn), 1):
            if number % SEQUENCES_PER_RELEASE == 0:
                corpus.release()
            held.append(instance)
            origins.append(origin)
            num_tokens += len(instance[0])
            if num_tokens >= SHUFFLE_TOKENS:
                yield records.collect(held, counts), origins
                held, origins, num_tokens = [], [], 0
        progress.advance(last - first)
    if held:
        yield records.collect(held, counts), origins
