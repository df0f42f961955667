"""Tokenized documents in flat columns, one file each, which processes map.

Two documents, which are the first and the third of their file:

    token_ids         [5 6 7 8 9 5]
    sentence_offsets  [0 3 5 6]        sentence i is token_ids[offsets[i]:offsets[i + 1]]
    document_offsets  [0 2 3]          document i is the sentences offsets[i]:offsets[i + 1]
    document_files    [0 0]            the text file, from 0
    document_numbers  [1 3]            the document's place in it, from 1

Those for causal language modelling, here "a dog" and "é", have pieces of any size for sentences. 0 opens and
closes each document:

    token_ids         [0 64 4 290 0 0 127 103 0]
    token_bytes       [0  1 1   3 0 0   2   0 0]     UTF-8 bytes of the text that the token represents
    sentence_offsets  [0 5 9]
    document_offsets  [0 1 2]
"""

import contextlib
import dataclasses
import functools
import mmap
import os
import shutil
import tempfile

import numpy as np

from bert_packed.core import storage

DTYPES = {"token_ids": np.int32, "token_bytes": np.int32, "document_files": np.int32}  # others: int64
ORIGINS = ("document_files", "document_numbers")
# Values are, for offsets, the column that they index
SENTENCES = {"token_ids": "", "sentence_offsets": "token_ids", "document_offsets": "sentence_offsets"}
STREAMS = {**SENTENCES, "token_bytes": ""}
HELD_TOKENS = 2**18  # until they are written
COPY_VALUES = 2**20  # joined at once


@dataclasses.dataclass(frozen=True)
class TokenCorpus:
    """Documents of tokens; no document and no sentence is empty."""

    token_ids: np.ndarray  # int32 [T]
    document_offsets: np.ndarray  # int64 [documents + 1], into sentences
    sentence_offsets: np.ndarray  # int64 [sentences + 1]
    token_bytes: np.ndarray | None = None  # int32 [T]; None of `SENTENCES`
    document_files: np.ndarray | None = None  # int32 [documents]
    document_numbers: np.ndarray | None = None  # int64 [documents]

    @property
    def num_documents(self):
        return len(self.document_offsets) - 1

    def release(self):
        """Release the memory of pages; the next read maps them again."""
        release(column for column in vars(self).values() if column is not None)

    def document_lengths(self, documents):
        """Tokens of documents, given by their numbers, int `[n]`: int64 `[n]`."""
        first, last = self.document_offsets[documents], self.document_offsets[np.asarray(documents) + 1]
        return self.sentence_offsets[last] - self.sentence_offsets[first]


def write_corpus(pieces, layout, folder, file_index):
    """Write the documents of a text file in bounded memory; returns their number.

    `pieces` are (document number, tokens of a sentence, for `STREAMS` also their bytes).
    """
    values = [name for name, into in layout.items() if not into]
    held = {name: [] for name in (*layout, *ORIGINS)}
    last, num_documents, num_sentences, num_tokens = None, 0, 0, 0
    with _open_for_writing(folder, held) as files:

        def flush():
            for name, found in held.items():
                files[name].write(np.array(found, _dtype(name)).tobytes())
                found.clear()

        held["sentence_offsets"].append(0)
        for number, *columns in pieces:
            if number != last:
                held["document_offsets"].append(num_sentences)
                held["document_numbers"].append(number)
                held["document_files"].append(file_index)
                last, num_documents = number, num_documents + 1
            for name, column in zip(values, columns, strict=True):
                held[name].extend(column)
            num_tokens += len(columns[0])
            held["sentence_offsets"].append(num_tokens)
            num_sentences += 1
            if len(held["token_ids"]) >= HELD_TOKENS:
                flush()
        held["document_offsets"].append(num_sentences)
        flush()
    return num_documents


def join_corpora(folders, layout, folder):
    """Concatenate the corpora of several folders in another."""
    columns = {**layout, **dict.fromkeys(ORIGINS, "")}
    totals = dict.fromkeys(columns, 0)
    with _open_for_writing(folder, columns) as files:
        for name in columns:
            if columns[name]:
                files[name].write(np.zeros(1, np.int64).tobytes())
        for part_folder in folders:
            part = vars(open_corpus(part_folder, layout))
            # the first offset equals the last one of the previous part
            found = {name: part[name][1:] if into else part[name] for name, into in columns.items()}
            for name, into in columns.items():
                _copy(found[name], totals[into] if into else 0, files[name])
            for name, values in found.items():
                totals[name] += len(values)


def open_corpus(folder, layout):
    names = (*layout, *ORIGINS)
    return TokenCorpus(**{name: map_array(os.path.join(folder, name), _dtype(name)) for name in names})


def _dtype(name):
    return DTYPES.get(name, np.int64)


@contextlib.contextmanager
def _open_for_writing(folder, names):
    """Dict from column to an open binary file; the files appear when the block has succeeded."""
    with contextlib.ExitStack() as stack:
        files = {}
        for name in names:
            partial = stack.enter_context(storage.write_whole(os.path.join(folder, name)))
            files[name] = stack.enter_context(storage.open_file(partial, "wb"))
        yield files


def _copy(values, shift, file):
    for start in range(0, len(values), COPY_VALUES):
        file.write((values[start : start + COPY_VALUES] + values.dtype.type(shift)).tobytes())


MOST_FETCHED = 8  # files from URLs that a process keeps: the columns of one corpus


def map_array(path, dtype):
    """Map a file: array `[n]` of a NumPy type. A URL is copied, once per process."""
    if storage.is_remote(path):
        # the key has size and time too: a restarted run writes another file under that name
        return _fetch(path, dtype, storage.size_and_time(path))
    with open(path, "rb") as file:
        return _map(file, dtype)


def map_bytes(path):
    """Map a file: uint8 array `[n]`. A URL is copied; the copy lives as long as the array."""
    return _map_copy(path, np.uint8) if storage.is_remote(path) else map_array(path, np.uint8)


def release(arrays):
    """Release the memory of mapped arrays' pages; the next read maps them again."""
    for array in arrays:
        mapping = getattr(array.base, "obj", array.base)  # NumPy 2 puts a view in between
        if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            mapping.madvise(mmap.MADV_DONTNEED)


def _map(file, dtype):
    # `np.memmap` is slow to index and hides its mapping
    is_empty = not os.fstat(file.fileno()).st_size  # an empty file cannot be mapped
    content = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, np.dtype(dtype))


@functools.lru_cache(maxsize=MOST_FETCHED)
def _fetch(path, dtype, stamp):
    return _map_copy(path, dtype)


def _map_copy(path, dtype):
    with storage.open_file(path) as source, tempfile.TemporaryFile() as target:
        shutil.copyfileobj(source, target)
        target.flush()
        return _map(target, dtype)
