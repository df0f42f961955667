"""How documents become streams of tokens for causal language modelling, with the bytes of each, on the disk.

Two documents, "a dog" and "é", where 0 opens and closes a document:

    token_ids         [0 64 4 290 0 0 127 103 0]
    token_bytes       [0  1 1   3 0 0   2   0 0]     UTF-8 bytes of the text that the token stands for
    document_offsets  [0 5 9]                        document i is token_ids[offsets[i]:offsets[i + 1]]

Every byte of a document's text is counted once: a space that the tokenizer leaves out counts with the token
after it, what follows the last token with the one that closes the document, and the bytes of a character that
several tokens make up with the first of them. Beside these are the origins of `token_corpus.py`.
"""

import dataclasses

import numpy as np

from bert_packed.text import tokenization
from data_gen.text.columns import copy_values, open_columns, open_for_writing, release, to_bytes
from data_gen.text.token_corpus import NUMBERS, ORIGINS

FILES = {"token_ids": np.int32, "token_bytes": np.int32, "document_offsets": np.int64}


@dataclasses.dataclass(frozen=True)
class TokenStreams:
    """Documents of tokens, each with the tokens that open and close it and one or more between them.

    Attributes:
        token_ids: int32 `[T]`.
        token_bytes: int32 `[T]`.
        document_offsets: int64 `[number of documents + 1]`, into both.
    """

    token_ids: np.ndarray
    token_bytes: np.ndarray
    document_offsets: np.ndarray

    @property
    def num_documents(self):
        return len(self.document_offsets) - 1

    def release(self):
        """Give back the memory of the pages that were read; the next reading maps them again."""
        release((self.token_ids, self.token_bytes, self.document_offsets))


def encode_texts(texts, tokenizer, folder):
    """Tokenize documents and write them to a folder, batch by batch.

    Documents that give no token are dropped; the others keep their number.

    Args:
        texts: Iterable of (number of the document, text); a document may come in several texts.
        tokenizer: `byte_bpe.DocumentTokenizer`.
        folder: Existing folder for the arrays.

    Returns:
        Number of documents.
    """
    with open_for_writing(folder, [*FILES, *NUMBERS]) as columns:
        writer = _Writer(columns, tokenizer)
        for batch in tokenization.batches(texts):
            codes = tokenizer.tokenizer.encode_batch([text for _, text in batch], add_special_tokens=False)
            for (number, text), code in zip(batch, codes, strict=True):
                writer.add(number, text, code)
            writer.flush()
        return writer.close()


def count_bytes(text, ends):
    """The bytes of a text that each of its tokens stands for, and how many are left behind the last one.

        "a dog", tokens that end at characters 1, 2 and 4   ->   [1 1 2], 1

    Args:
        text: str.
        ends: Int array `[n]`: the character at which each token ends.

    Returns:
        int64 `[n]`, and int; together they are the UTF-8 bytes of `text`.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    byte_ends = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(widths, out=byte_ends[1:])
    # some tokenizers give offsets that go back, such as those of one character's accents
    places = byte_ends[np.maximum.accumulate(np.asarray(ends, np.int64))]
    return np.diff(places, prepend=0), int(byte_ends[-1] - (places[-1] if len(places) else 0))


def join_streams(folders, folder):
    """Write the documents of several folders, one a text file, in this order, to another."""
    num_tokens = 0
    with open_for_writing(folder, [*FILES, *ORIGINS]) as columns:
        for index, part_folder in enumerate(folders):
            part = open_streams(part_folder)
            copy_values(open_columns(part_folder, NUMBERS)[0], 0, columns["document_numbers"])
            copy_values(np.zeros(part.num_documents, np.int32), index, columns["document_files"])
            copy_values(part.token_ids, 0, columns["token_ids"])
            copy_values(part.token_bytes, 0, columns["token_bytes"])
            copy_values(part.document_offsets[:-1], num_tokens, columns["document_offsets"])
            num_tokens += len(part.token_ids)
        columns["document_offsets"].write(to_bytes([num_tokens], np.int64))


def open_streams(folder):
    """Memory-map what `encode_texts` wrote: `TokenStreams`."""
    return TokenStreams(*open_columns(folder, FILES))


class _Writer:
    """Documents on their way to the disk, of which the last may go on in the next text."""

    def __init__(self, columns, tokenizer):
        self._columns, self._tokenizer = columns, tokenizer
        self._ids, self._bytes, self._starts, self._numbers = [], [], [], []
        self._num_tokens = self._num_documents = 0
        self._number, self._is_open, self._rest = None, False, 0  # the document, a token in it, bytes since

    def add(self, number, text, code):
        """Add a text, and the `Encoding` of it."""
        if number != self._number:
            self._end_document()
            self._number = number
        num_bytes, rest = count_bytes(text, [end for _, end in code.offsets])
        if not len(num_bytes):
            self._rest += rest
            return
        if not self._is_open:
            self._is_open = True
            self._starts.append(self._num_tokens)
            self._numbers.append(number)
            self._put([self._tokenizer.start_id], [0])
        num_bytes[0] += self._rest
        self._rest = rest
        self._put(code.ids, num_bytes)

    def flush(self):
        """Write what is held."""
        for name, pieces in (("token_ids", self._ids), ("token_bytes", self._bytes)):
            for piece in pieces:
                self._columns[name].write(to_bytes(piece, FILES[name]))
            pieces.clear()
        for name, values in (("document_offsets", self._starts), ("document_numbers", self._numbers)):
            self._columns[name].write(to_bytes(values, np.int64))
            self._num_documents += len(values) if name == "document_offsets" else 0
            values.clear()

    def close(self):
        """End the last document; returns the number of documents."""
        self._end_document()
        self.flush()
        self._columns["document_offsets"].write(to_bytes([self._num_tokens], np.int64))
        return self._num_documents

    def _put(self, ids, num_bytes):
        self._ids.append(ids)
        self._bytes.append(num_bytes)
        self._num_tokens += len(ids)

    def _end_document(self):
        if self._is_open:
            self._put([self._tokenizer.end_id], [self._rest])
        self._is_open, self._rest = False, 0
