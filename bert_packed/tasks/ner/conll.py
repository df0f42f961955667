"""CoNLL files: sentences of words, each with a tag, and the sequences made of them.

    EU NNP B-NP B-ORG           words [EU rejects]      sequence   [CLS] eu re ##ject ##s [SEP]
    rejects VBZ B-VP O          tags  [B-ORG O]         positions        1  2
                                                        tags             B-ORG O

Columns are separated by spaces or tabs, the word in the first, the tag in the last. An empty line ends a
sentence; lines that begin with -DOCSTART- are skipped.
"""

import dataclasses
import re

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_text
from bert_packed.records.sequences import BERT_LAYOUT, Sequences, make_sequences
from bert_packed.tasks.squad.windows import most_context, window_starts

DOCUMENT_START = "-DOCSTART-"
NUM_SPECIAL = 2  # [CLS] and [SEP]
SEPARATORS = " \t\r"  # no other space: a word may hold one that does not break


@dataclasses.dataclass(frozen=True)
class Sentences:
    """A file's sentences, each with at least one word."""

    words: list[list[str]]
    tags: list[list[str]] | None  # None where the file has no column for them
    line_numbers: list[int]  # of each sentence's first line, from 1

    @property
    def num_words(self):
        return sum(map(len, self.words))


@dataclasses.dataclass(frozen=True)
class TagSequences:
    """All sequences of a file.

    Their predictions are the words: each at its first token, in the window where it has the most context,
    with the number of its tag; 0 where the file has none.
    """

    sequences: Sequences
    words: np.ndarray  # int64 `[num_words]`, the word of the file that each prediction is
    num_cut: int  # sentences that were cut into several windows
    num_empty: int  # words without a token, read as the unknown one


def read_conll(path):
    """Read a file: `Sentences`, without tags where every line has one column; raises `InputError`."""
    try:
        lines = read_text(path).split("\n")
    except FileNotFoundError as error:
        raise InputError(f"{path} must exist. Received: no such file.") from error
    words, tags, line_numbers = [], [], []
    has_tags, goes_on = None, False
    for number, line in enumerate(lines, 1):
        columns = re.split(r"[ \t]+", line.strip(SEPARATORS))
        if not columns[0] or columns[0] == DOCUMENT_START:
            goes_on = False
            continue
        has_tags = len(columns) > 1 if has_tags is None else has_tags
        if has_tags != (len(columns) > 1):
            rule = "a tag in its last column" if has_tags else "one column"
            raise InputError(
                f"{path}, line {number}: must have {rule}, as the lines before. Received: {line!r:.80}."
            )
        if not goes_on:
            goes_on = True
            words.append([])
            tags.append([])
            line_numbers.append(number)
        words[-1].append(columns[0])
        tags[-1].append(columns[-1])
    if not words:
        raise InputError(f"{path} must hold a sentence. Received: none.")
    return Sentences(words, tags if has_tags else None, line_numbers)


def find_tags(sentences):
    """The tags of a file, each once, sorted as transformers' run_ner does."""
    return tuple(sorted({tag for tags in sentences.tags for tag in tags}))


def number_tags(path, sentences, names):
    """Tags as indices of `names`, by sentence; `InputError` names the line of a tag that is none of them."""
    numbers = {name: number for number, name in enumerate(names)}
    for tags, line in zip(sentences.tags, sentences.line_numbers, strict=True):
        for place, tag in enumerate(tags):
            if tag not in numbers:
                raise InputError(
                    f"{path}, line {line + place}: the tag must be one of {', '.join(names)}. "
                    f"Received: {tag!r:.80}."
                )
    return [[numbers[tag] for tag in tags] for tags in sentences.tags]


def make_tag_sequences(words, tags, tokenizer, max_seq_length, doc_stride, path=""):
    """Cut sentences into windows, and predict every word's tag once, where it has the most context.

        pieces     a b ##c d e ##f ##g     3 a window, stride 2
        windows    [a b ##c] [##c d e] [e ##f ##g]
        predicted   a b           d e                       nothing in the third window: it is left out

    Windows and the rule of the most context are those of `squad/windows.py`. Words and their tags are lists
    by sentence; `tags` None is 0 for all; `tokenizer` is a `tokenization.TextTokenizer`.
    """
    tokens, lengths, numbers = [], [], []
    positions, labels, num_asked, asked = [], [], [], []
    first_word = num_cut = num_empty = 0
    for number, own in enumerate(tokenizer.encode_words(words), 1):
        # Control characters alone make no WordPiece; the word has a tag all the same
        num_empty += sum(not found for found in own)
        own = [found or [tokenizer.unknown_id] for found in own]
        ids = [piece for found in own for piece in found]
        word_starts = np.cumsum([0, *map(len, own[:-1])])
        windows = window_starts(len(ids), max_seq_length - NUM_SPECIAL, doc_stride)
        num_cut += len(windows) > 1
        for (start, size), is_best in zip(windows, most_context(windows), strict=True):
            here = np.flatnonzero((word_starts >= start) & (word_starts < start + size))
            here = here[is_best[word_starts[here] - start]]
            if not len(here):
                continue
            tokens.extend((tokenizer.cls_id, *ids[start : start + size], tokenizer.sep_id))
            lengths.append(size + NUM_SPECIAL)
            numbers.append(number)
            positions.extend(word_starts[here] - start + 1)
            labels.extend(tags[number - 1][word] if tags else 0 for word in here)
            num_asked.append(len(here))
            asked.extend(first_word + here)
        first_word += len(own)
    sequences = make_sequences(
        BERT_LAYOUT,
        str(path),
        tokens=tokens,
        lengths=lengths,
        prediction_positions=positions,
        prediction_ids=labels,
        num_predictions=num_asked,
        record_numbers=numbers,
    )
    return TagSequences(sequences, np.array(asked, np.int64), num_cut, num_empty)
