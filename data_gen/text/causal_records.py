"""Records for causal language modelling: pieces of documents, with the next token of each as its label.

A document of 7 tokens, of which 0 opens and closes it, in pieces of at most 4:

    input_ids    [0 7 4 8] [9 5 0]
    label_ids    [7 4 8 9] [5 0 0]     the first token of a piece is predicted in the piece before it
    label_mask   [1 1 1 1] [1 1 0]     0 at the document's end
    num_bytes          14        3     UTF-8 bytes of the text that the labels represent

A last piece of only the closing token is left out: the piece before predicts it.
"""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.records.example_bytes import serialize_ragged
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    LABEL_BYTES,
    make_sequences,
    sum_ranges,
    take,
    to_offsets,
)
from bert_packed.text import tokenization
from bert_packed.text.vocabularies import ByteBpe, WordPieces
from data_gen.text.token_corpus import STREAMS


@dataclasses.dataclass(frozen=True)
class CausalRecords:
    """Records for causal language modelling, with the methods of `BertRecords`."""

    vocabulary: WordPieces | ByteBpe
    max_seq_length: int

    num_passes = 1  # a second one would make the same sequences
    is_verbatim = True
    layout = STREAMS
    counted = ("num_predictions", "num_bytes")  # each byte of the documents once

    def encode(self, texts, vocab_path):
        return encode_texts(texts, self.vocabulary.load(vocab_path))

    def draw(self, corpus, groups, vocab_path, seed, split_index, counts):
        for pairs, _ in groups:
            for duplicate, document in pairs.tolist():
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

    def describe(self, counts):
        return {}

    def summarize(self, manifest):
        num_predictions, num_bytes = (
            sum(split[name] for split in manifest["splits"].values())
            for name in ("num_predictions", "num_bytes")
        )
        each = num_bytes / num_predictions
        return f"{num_predictions} predictions cover {num_bytes} bytes of text ({each:.2f} each)"

    def warnings_about(self, manifest):
        return []


def encode_texts(texts, tokenizer):
    """Tokenize documents, with an opening and a closing token: yields pieces for `write_corpus`.

    Each byte of a document's text counts once: a space that the tokenizer drops counts with the token after
    it, text after the last token with the closing token, and a character of several tokens with the first of
    them. Documents without a token are left out.

    Args:
        texts: Iterable of (document number, text); a document may come in several texts.
        tokenizer: `byte_bpe.DocumentTokenizer`.
    """
    current, is_open, rest = None, False, 0  # `rest`: bytes since the last token
    for batch in tokenization.batches(texts):
        codes = tokenizer.tokenizer.encode_batch([text for _, text in batch], add_special_tokens=False)
        for (number, text), code in zip(batch, codes, strict=True):
            if number != current:
                if is_open:
                    yield current, [tokenizer.end_id], [rest]
                current, is_open, rest = number, False, 0
            num_bytes, left = count_bytes(text, [end for _, end in code.offsets])
            if not len(num_bytes):
                rest += left
                continue
            if not is_open:
                yield number, [tokenizer.start_id], [0]
                is_open = True
            num_bytes[0] += rest
            rest = left
            yield number, code.ids, num_bytes.tolist()
    if is_open:
        yield current, [tokenizer.end_id], [rest]


def count_bytes(text, ends):
    """UTF-8 bytes of each token's text, int64 `[n]`, and those after the last token.

    "a dog", tokens that end at characters 1, 2 and 4   ->   [1 1 2], 1
    """
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    byte_ends = to_offsets(widths)
    # offsets of some tokenizers decrease, for example at accents of one character
    places = byte_ends[np.maximum.accumulate(np.asarray(ends, np.int64))]
    return np.diff(places, prepend=0), int(byte_ends[-1] - (places[-1] if len(places) else 0))
