"""How a tokenized corpus is held: three flat arrays, on disk, so that workers share it without copies.

Two documents, the first of two sentences:

    token_ids         [5 6 7 8 9 5]
    sentence_offsets  [0 3 5 6]        sentence i is token_ids[offsets[i]:offsets[i + 1]]
    document_offsets  [0 2 3]          document i is the sentences offsets[i]:offsets[i + 1]

and two more, which only `--provenance` needs, where the file had another document between them:

    document_files    [0 0]            the text file, from 0
    document_numbers  [1 3]            the document's place in it, from 1
"""

import dataclasses

import numpy as np

from bert_packed.text import tokenization
from data_gen.text.columns import copy_values, open_columns, open_for_writing, release, to_bytes

FILES = {"token_ids": np.int32, "sentence_offsets": np.int64, "document_offsets": np.int64}
NUMBERS = {"document_numbers": np.int64}
ORIGINS = {"document_files": np.int32, **NUMBERS}


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

    def release(self):
        """Give back the memory of the pages that were read; the next reading maps them again."""
        release((self.token_ids, self.sentence_offsets, self.document_offsets))

    def document_lengths(self, documents):
        """Tokens of some documents, int `[n]` numbers of them: int64 `[n]`."""
        first, last = self.document_offsets[documents], self.document_offsets[np.asarray(documents) + 1]
        return self.sentence_offsets[last] - self.sentence_offsets[first]


def encode_documents(sentences, tokenizer, folder):
    """Tokenize documents and write them to a folder, batch by batch: the text is never held as a whole.

    Sentences that give no WordPiece, and documents without a sentence left, are dropped; the others keep
    their number, in the file `document_numbers`.

    Args:
        sentences: Iterable of (number of the document, sentence), as `corpus.read_sentences` yields them.
        tokenizer: From `tokenization.make_tokenizer`.
        folder: Existing folder for the arrays.

    Returns:
        `TokenCorpus`, memory-mapped.
    """
    last_document, num_tokens, num_sentences = None, 0, 0
    with open_for_writing(folder, [*FILES, "document_numbers"]) as columns:
        columns["sentence_offsets"].write(to_bytes([0], np.int64))
        for batch in tokenization.batches(sentences):
            numbers, texts = zip(*batch, strict=True)
            encoded = tokenization.encode_sentences(tokenizer, list(texts))
            token_ids, sentence_ends, document_starts, document_numbers = [], [], [], []
            for number, ids in zip(numbers, encoded, strict=True):
                if not ids:
                    continue
                if number != last_document:
                    document_starts.append(num_sentences + len(sentence_ends))
                    document_numbers.append(number)
                    last_document = number
                token_ids.extend(ids)
                sentence_ends.append(num_tokens + len(token_ids))
            columns["token_ids"].write(to_bytes(token_ids, np.int32))
            columns["sentence_offsets"].write(to_bytes(sentence_ends, np.int64))
            columns["document_offsets"].write(to_bytes(document_starts, np.int64))
            columns["document_numbers"].write(to_bytes(document_numbers, np.int64))
            num_tokens += len(token_ids)
            num_sentences += len(sentence_ends)
        columns["document_offsets"].write(to_bytes([num_sentences], np.int64))
    return open_corpus(folder)


def join_corpora(folders, folder):
    """Write the documents of several folders, one a text file, in this order, to another."""
    num_tokens, num_sentences = 0, 0
    with open_for_writing(folder, [*FILES, *ORIGINS]) as columns:
        columns["sentence_offsets"].write(to_bytes([0], np.int64))
        for index, part_folder in enumerate(folders):
            part = open_corpus(part_folder)
            copy_values(open_columns(part_folder, NUMBERS)[0], 0, columns["document_numbers"])
            copy_values(np.zeros(part.num_documents, np.int32), index, columns["document_files"])
            copy_values(part.token_ids, 0, columns["token_ids"])
            copy_values(part.sentence_offsets[1:], num_tokens, columns["sentence_offsets"])
            copy_values(part.document_offsets[:-1], num_sentences, columns["document_offsets"])
            num_tokens += len(part.token_ids)
            num_sentences += len(part.sentence_offsets) - 1
        columns["document_offsets"].write(to_bytes([num_sentences], np.int64))


def open_corpus(folder):
    """Memory-map what `encode_documents` wrote: `TokenCorpus`."""
    return TokenCorpus(*open_columns(folder, FILES))


def open_origins(folder):
    """Memory-map where the documents come from, in what `join_corpora` wrote.

    Returns:
        Two arrays `[number of documents]`: int32 indices of text files, and int64 numbers within them.
    """
    return open_columns(folder, ORIGINS)
