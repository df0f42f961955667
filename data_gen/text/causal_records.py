"""How documents become records for causal language modelling: pieces of text, each token's next as its label.

A document of 7 tokens, the first and the last of which stand around its text, in pieces of at most 4:

    input_ids    [0 7 4 8] [9 5 0]
    label_ids    [7 4 8 9] [5 0 0]     the first token of a piece is predicted in the piece before it
    label_mask   [1 1 1 1] [1 1 0]     at the document's end nothing is
    num_bytes          14        3     UTF-8 bytes of the text that the labels stand for

A last piece of nothing but the document's end is left out: the piece before predicts it.
"""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.records.example_bytes import serialize_ragged
from bert_packed.records.sequences import CAUSAL_LAYOUT, LABEL_BYTES, make_sequences, sum_ranges, take
from bert_packed.text import tokenization
from bert_packed.text.vocabularies import VocabularyKind
from data_gen.text.corpus import WholeTexts, join_lines
from data_gen.text.token_streams import encode_texts, join_streams, open_streams


@dataclasses.dataclass(frozen=True)
class CausalRecords:
    """Records for causal language modelling; `text_records.TextRecords` says what each member is for.

    Attributes:
        vocabulary: A `VocabularyKind`.
        max_seq_length: Most tokens of a sequence.
    """

    vocabulary: VocabularyKind
    max_seq_length: int
    num_passes = 1  # a second one would make the same sequences

    def open_texts(self, paths):
        """See `TextRecords`: as it stands, spaces and line ends too."""
        return WholeTexts(paths, tokenization.ENCODE_CHARACTERS)

    def join_sentences(self, sentences):
        """See `TextRecords`: a line each."""
        return list(join_lines(sentences, tokenization.ENCODE_CHARACTERS))

    def tokenize(self, texts, vocab_path, folder):
        """See `TextRecords`."""
        return encode_texts(texts, self.vocabulary.load(vocab_path), folder)

    def join(self, folders, folder):
        """See `TextRecords`."""
        join_streams(folders, folder)

    def open_corpus(self, folder):
        """See `TextRecords`: `TokenStreams`."""
        return open_streams(folder)

    def load(self, vocab_path):
        """See `TextRecords`: nothing, the corpus has the tokens around documents."""

    def draw(self, corpus, pairs, documents, vocabulary, seed, split_index, counts):
        """See `TextRecords`."""
        for duplicate, document in np.asarray(pairs).tolist():
            first, last = corpus.document_offsets[document : document + 2].tolist()
            for start in range(first, last - 1, self.max_seq_length):  # not of the end alone
                end = min(start + self.max_seq_length, last)
                predicted = slice(start + 1, min(end + 1, last))
                arrays = (
                    corpus.token_ids[start:end],
                    corpus.token_ids[predicted],
                    corpus.token_bytes[predicted],
                )
                # copies, since the corpus may be released meanwhile
                yield (duplicate, document), tuple(array.copy() for array in arrays)

    def collect(self, drawn, counts):
        """See `TextRecords`: `Sequences`."""
        tokens, labels_of, bytes_of = zip(*drawn, strict=True)
        lengths, num_labels = (np.array([len(ids) for ids in arrays]) for arrays in (tokens, labels_of))
        mask = np.ones(lengths.sum(), bool)
        mask[np.cumsum(lengths)[num_labels < lengths] - 1] = False  # where documents end
        labels, label_bytes = np.zeros((2, len(mask)), np.int32)
        labels[mask], label_bytes[mask] = np.concatenate(labels_of), np.concatenate(bytes_of)
        num_bytes = sum_ranges(label_bytes, lengths)
        counts["num_predictions"] += len(labels[mask])
        counts["num_bytes"] += int(num_bytes.sum())
        return make_sequences(
            CAUSAL_LAYOUT | LABEL_BYTES,
            "",
            tokens=np.concatenate(tokens),
            labels=labels,
            label_mask=mask,
            label_bytes=label_bytes,
            lengths=lengths,
            num_bytes=num_bytes,
            record_numbers=np.arange(1, len(drawn) + 1),
        )

    def serialize(self, sequences, order):
        """See `TextRecords`."""
        chosen = take(sequences, order)
        return serialize_ragged(
            {
                schema.INPUT_IDS: (chosen["tokens"], chosen["lengths"]),
                schema.LABEL_IDS: (chosen["labels"], chosen["lengths"]),
                schema.LABEL_MASK: (chosen["label_mask"], chosen["lengths"]),
                schema.LABEL_BYTES: (chosen["label_bytes"], chosen["lengths"]),
                schema.NUM_BYTES: (chosen["num_bytes"], np.ones(len(chosen), np.int64)),
            }
        )

    def new_counts(self):
        """Labels, and bytes of the text that they stand for: each byte of the documents once."""
        return {"num_predictions": 0, "num_bytes": 0}

    def describe(self, counts):
        """See `TextRecords`: nothing else."""
        return {}

    def summarize(self, manifest):
        """See `TextRecords`."""
        num_predictions, num_bytes = (
            sum(split[name] for split in manifest["splits"].values())
            for name in ("num_predictions", "num_bytes")
        )
        each = num_bytes / num_predictions
        return f"{num_predictions} predictions stand for {num_bytes} bytes of text ({each:.2f} each)"

    def warnings_about(self, manifest):
        """See `TextRecords`: whatever text there is, something is learnt from it."""
        return []
