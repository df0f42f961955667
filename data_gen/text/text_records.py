"""Records of text: BERT's, of masked sentences, and pieces of documents for causal language modelling.

A document of 7 tokens, of which 0 opens and closes it, in causal pieces of at most 4:

    input_ids    [0 7 4 8] [9 5 0]
    label_ids    [7 4 8 9] [5 0 0]     the first token of a piece is predicted in the piece before it
    label_mask   [1 1 1 1] [1 1 0]     0 at the document's end
    num_bytes          14        3     UTF-8 bytes of the text that the labels represent

A last piece of only the closing token is left out: the piece before predicts it.
"""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.records.example_bytes import serialize_examples, serialize_ragged
from bert_packed.records.sequences import (
    CAUSAL_LAYOUT,
    LABEL_BYTES,
    make_sequences,
    sum_ranges,
    take,
    to_offsets,
)
from bert_packed.text import tokenization
from bert_packed.text.byte_bpe import split_lines
from bert_packed.text.vocabularies import ByteBpe, WordPieces, load_maskable
from data_gen.text.instances import InstanceRules, collect_instances, draw_instances, to_features
from data_gen.text.token_corpus import SENTENCES, STREAMS

# A larger share of tokens cut is reported; prose with a sentence per line has 0.03 at length 512, 0.11 at 128
MOST_CUT = 0.25
MIN_LABELS = 20  # sequences of a split whose labels are checked
FORMAT_RULE = (
    "warning: text must have one sentence a line and a blank line between documents, or be JSON lines with "
    "`text`, whose sentences are found here"
)


@dataclasses.dataclass(frozen=True)
class BertRecords:
    """BERT's records; must be picklable."""

    vocabulary: WordPieces | ByteBpe
    rules: InstanceRules
    num_passes: int  # over the training documents, each with other segments and masks

    layout = SENTENCES  # that of the corpus
    # Shards add these numbers up for the manifest; documents' tokens count once per pass
    counted = ("num_random_nexts", "num_tokens_read", "num_tokens_used")

    @property
    def is_verbatim(self):
        """True if text is read with its spaces and line ends, rather than as sentences."""
        return isinstance(self.vocabulary, ByteBpe)

    @property
    def max_seq_length(self):
        return self.rules.max_seq_length

    def encode(self, sentences, vocab_path):
        """Tokenize sentences, or texts, of (document number, str): yields pieces for `write_corpus`.

        Sentences without a token, and documents without such a sentence, are left out. In the place of
        sentences, a verbatim text has lines, tokenized together: a token may hold the end of a line and the
        beginning of the next.
        """
        ends_line = load_maskable(vocab_path).ends_line if self.is_verbatim else None
        tokenizer = self.vocabulary.load(vocab_path).tokenizer
        for batch in tokenization.batches(sentences):
            numbers, texts = zip(*batch, strict=True)
            encoded = tokenization.encode_sentences(tokenizer, list(texts))
            for number, ids in zip(numbers, encoded, strict=True):
                if self.is_verbatim:
                    yield from ((number, line) for line in split_lines(ids, ends_line))
                elif ids:
                    yield number, ids

    def draw(self, corpus, groups, vocab_path, seed, split_index, counts):
        """Yield (duplicate, document) and a tuple for `collect`, by sequence; updates `counts`.

        `groups` are (pairs, documents), as in lists from `shuffled_pairs`.
        """
        vocabulary = load_maskable(vocab_path)
        for pairs, documents in groups:
            counts["num_tokens_read"] += int(corpus.document_lengths(pairs[:, 1]).sum())
            yield from draw_instances(corpus, pairs, documents, vocabulary, self.rules, seed, split_index)

    def collect(self, drawn, counts):
        """`Sequences` of a list of drawn tuples; updates `counts`."""
        sequences = collect_instances(drawn)
        counts["num_random_nexts"] += int(np.count_nonzero(sequences["next_sentence_labels"]))
        counts["num_tokens_used"] += sum(num_own for *_, num_own in drawn)
        return sequences

    def serialize(self, sequences, order):
        rules = self.rules
        features = to_features(take(sequences, order), rules.max_seq_length, rules.max_predictions_per_seq)
        return serialize_examples(features)

    def describe(self, counts):
        """Further numbers of a split for the manifest."""
        return {"num_tokens_cut": counts["num_tokens_read"] - counts["num_tokens_used"]}

    def summarize(self, manifest):
        cut, read = _total(manifest, "num_tokens_cut"), _total(manifest, "num_tokens_read")
        return f"{cut} of {read} tokens of text were cut ({100 * cut / read:.1f} %)"

    def warnings_about(self, manifest):
        lines = []
        for split, content in manifest["splits"].items():
            share = content["num_tokens_cut"] / content["num_tokens_read"]
            if share > MOST_CUT:
                lines.append(
                    f"warning: {100 * share:.0f} % of the tokens of split {split} are in no sequence, "
                    "because lines are too long for max_seq_length="
                    f"{manifest['settings']['max_seq_length']}"
                )
            label = content["num_random_nexts"] / content["num_sequences"]
            # a few labels may all be equal by chance; twenty are in one of half a million splits
            if self.rules.next_sentences and label in (0, 1) and content["num_sequences"] >= MIN_LABELS:
                is_one = content["num_documents"] == 1
                cause = "the text is one document" if is_one else "no document has a next line"
                lines.append(
                    f"warning: all next_sentence_labels of split {split} are {label:.0f}, from which nothing "
                    f"is learned: {cause}"
                )
        return [*lines, FORMAT_RULE] if lines else []


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
                sentences = corpus.document_offsets[document : document + 2]
                first, last = corpus.sentence_offsets[sentences].tolist()
                for start in range(first, last - 1, self.max_seq_length):  # the end alone is no piece
                    end = min(start + self.max_seq_length, last)
                    predicted = slice(start + 1, min(end + 1, last))
                    num_labels = predicted.stop - predicted.start  # fewer than tokens at the document's end
                    # Rows are tokens, labels, their bytes, and where there are labels. They are copied, as
                    # the corpus may be released meanwhile
                    piece = np.zeros((4, end - start), np.int32)
                    piece[0] = corpus.token_ids[start:end]
                    piece[1, :num_labels] = corpus.token_ids[predicted]
                    piece[2, :num_labels] = corpus.token_bytes[predicted]
                    piece[3, :num_labels] = 1
                    yield (duplicate, document), piece

    def collect(self, drawn, counts):
        tokens, labels, label_bytes, mask = np.concatenate(drawn, axis=1)
        lengths = np.array([piece.shape[1] for piece in drawn])
        num_bytes = sum_ranges(label_bytes, lengths)
        counts["num_predictions"] += int(mask.sum())
        counts["num_bytes"] += int(num_bytes.sum())
        return make_sequences(
            CAUSAL_LAYOUT | LABEL_BYTES,
            "",
            tokens=tokens,
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
        num_predictions, num_bytes = _total(manifest, "num_predictions"), _total(manifest, "num_bytes")
        each = num_bytes / num_predictions
        return f"{num_predictions} predictions cover {num_bytes} bytes of text ({each:.2f} each)"

    def warnings_about(self, manifest):
        return []


def _total(manifest, name):
    return sum(split[name] for split in manifest["splits"].values())


def encode_texts(texts, tokenizer):
    """Tokenize documents, with an opening and a closing token: yields pieces for `write_corpus`.

    Each byte of a document's text counts once: a space that the tokenizer drops counts with the token after
    it, text after the last token with the closing token, and a character of several tokens with the first of
    them. Documents without a token are left out. A document may come in several texts.
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
