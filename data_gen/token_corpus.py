"""How a tokenized corpus is held: three flat arrays, on disk, so that workers share it without copies.

Two documents, the first of two sentences:

    token_ids         [5 6 7 8 9 5]
    sentence_offsets  [0 3 5 6]        sentence i is token_ids[offsets[i]:offsets[i + 1]]
    document_offsets  [0 2 3]          document i is the sentences offsets[i]:offsets[i + 1]
"""

import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np

from data_gen import tokenization
from data_gen.sequences import to_offsets

TOKEN_FILE = "token_ids.int32"


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Documents of sentences of WordPieces; no sentence and no document is empty.

    Attributes:
        token_ids: int32 `[T]`.
        sentence_offsets: int64 `[number of sentences + 1]`, into `token_ids`.
        document_offsets: int64 `[number of documents + 1]`, into the sentences.
    """

    token_ids: np.ndarray
    sentence_offsets: np.ndarray
    document_offsets: np.ndarray

    @property
    def num_documents(self):
        return len(self.document_offsets) - 1


def encode_documents(documents, tokenizer, folder):
    """Tokenize documents and write them to a folder, batch by batch: the text is never held as a whole.

    Sentences that give no WordPiece, and documents without a sentence left, are dropped.

    Args:
        documents: Iterable of lists of sentences.
        tokenizer: From `tokenization.make_tokenizer`.
        folder: Existing folder for the arrays.

    Returns:
        `TokenCorpus`, memory-mapped.
    """
    sentence_lengths, document_lengths = [], []
    sentences = ((number, s) for number, document in enumerate(documents) for s in document)
    last_document = -1
    with open(Path(folder, TOKEN_FILE), "wb") as file:
        while batch := list(islice(sentences, tokenization.ENCODE_BATCH)):
            numbers, texts = zip(*batch, strict=True)
            encoded = tokenization.encode_sentences(tokenizer, list(texts))
            for number, ids in zip(numbers, encoded, strict=True):
                if not ids:
                    continue
                if number != last_document:
                    document_lengths.append(0)
                    last_document = number
                document_lengths[-1] += 1
                sentence_lengths.append(len(ids))
                np.asarray(ids, np.int32).tofile(file)
    np.save(Path(folder, "sentence_offsets.npy"), to_offsets(sentence_lengths))
    np.save(Path(folder, "document_offsets.npy"), to_offsets(document_lengths))
    return open_corpus(folder)


def open_corpus(folder):
    """Memory-map what `encode_documents` wrote: `TokenCorpus`."""
    path = Path(folder, TOKEN_FILE)
    empty = path.stat().st_size == 0  # which cannot be mapped
    return TokenCorpus(
        # asarray: the same mapped memory, without the cost of memmap's own indexing
        np.zeros(0, np.int32) if empty else np.asarray(np.memmap(path, np.int32, "r")),
        np.asarray(np.load(Path(folder, "sentence_offsets.npy"), mmap_mode="r")),
        np.asarray(np.load(Path(folder, "document_offsets.npy"), mmap_mode="r")),
    )
