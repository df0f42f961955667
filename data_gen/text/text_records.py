"""All that making records asks of an objective: `BertRecords` and `CausalRecords` answer.

The steps of `create_steps.py` and `create_job.py` tokenize inputs, join what that gave, cut the documents
into shards and write them; what a document becomes is behind these members.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bert_packed.text.vocabularies import VocabularyKind

Texts = Iterable[tuple[int, str]]  # number of the document in its file, from 1; a sentence or more of it


@runtime_checkable
class TextRecords(Protocol):
    """One objective's records. Instances are frozen and travel to other processes."""

    @property
    def vocabulary(self) -> VocabularyKind:
        """How text becomes tokens."""

    @property
    def max_seq_length(self) -> int:
        """Most tokens of a sequence."""

    @property
    def num_passes(self) -> int:
        """How often the documents of the training split are read."""

    def open_texts(self, paths: tuple[str, ...]) -> Texts:
        """The documents of text files, read anew each time they are iterated, which can be pickled."""

    def join_sentences(self, sentences: Texts) -> Texts:
        """The documents of a list of sentences, in the form that `open_texts` gives."""

    def tokenize(self, texts: Texts, vocab_path: str, folder: str) -> int:
        """Tokenize documents into a folder; returns how many have a token."""

    def join(self, folders: list[str], folder: str) -> None:
        """Join tokenized folders, one a text file, in this order, into another."""

    def open_corpus(self, folder: str) -> Any:
        """Map what `join` wrote: an object with `release`."""

    def load(self, vocab_path: str) -> Any:
        """What `draw` needs to know of the vocabulary in a file."""

    def draw(
        self,
        corpus: Any,
        pairs: np.ndarray,
        documents: np.ndarray,
        vocabulary: Any,
        seed: int,
        split_index: int,
        counts: dict[str, int],
    ) -> Iterator[tuple[tuple[int, int], tuple]]:
        """Make the sequences of (duplicate, document) pairs, one by one.

        Args:
            corpus: From `open_corpus`.
            pairs: int `[m, 2]`.
            documents: int `[d]`, ascending: all documents of the split.
            vocabulary: From `load`.
            seed, split_index: What random choices are drawn from.
            counts: Dict of `num_tokens_read` and others, to be added to.

        Yields:
            The pair, and a tuple for `collect` that begins with the tokens.
        """

    def collect(self, drawn: list[tuple], counts: dict[str, int]) -> Any:
        """Sequences of a list of what `draw` yields, with `lengths`; what they hold is added to `counts`."""

    def serialize(self, sequences: Any, order: np.ndarray) -> list[bytes]:
        """The records of the sequences at `order`, int `[m]`."""

    def new_counts(self) -> dict[str, int]:
        """What is counted, all 0: numbers that shards add up and the manifest names."""

    def describe(self, counts: dict[str, int]) -> dict[str, int]:
        """What else the manifest says, from the counts of a split."""

    def summarize(self, manifest: dict) -> str:
        """What a run made, in words."""

    def warnings_about(self, manifest: dict) -> list[str]:
        """What is odd about the text: list of lines."""
