"""BERT's records: sentence pairs, or sentences of one document, masked and padded to equal length."""

import dataclasses

import numpy as np

from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.sequences import take
from bert_packed.text import tokenization
from bert_packed.text.byte_bpe import split_lines
from bert_packed.text.vocabularies import ByteBpe, WordPieces, load_maskable
from data_gen.text.instances import (
    NUM_SPECIAL,
    NUM_SPECIAL_ALONE,
    InstanceRules,
    collect_instances,
    count_own_tokens,
    draw_instances,
    to_features,
)
from data_gen.text.token_corpus import SENTENCES

# Share of the text's tokens; for prose with a sentence per line, it is 0.03 at length 512, 0.11 at 128
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

    layout = SENTENCES  # of the corpus
    # Numbers that shards add up for the manifest; documents' tokens count once per pass
    counted = ("num_random_nexts", "num_tokens_read", "num_tokens_used")

    @property
    def is_verbatim(self):
        """Whether text is read with its spaces and line ends, not sentences."""
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
        """Yield (duplicate, document) and a tuple for `collect`, which begins with the tokens, by sequence.

        Args:
            corpus: `TokenCorpus`.
            groups: Iterable of (pairs, documents), as in lists from `shuffled_pairs`.
            vocab_path: Path of the vocabulary.
            seed, split_index: Keys of random choices, with the duplicate and the document.
            counts: Dict of `counted`, which is updated.
        """
        vocabulary = load_maskable(vocab_path)
        for pairs, documents in groups:
            counts["num_tokens_read"] += int(corpus.document_lengths(pairs[:, 1]).sum())
            yield from draw_instances(corpus, pairs, documents, vocabulary, self.rules, seed, split_index)

    def collect(self, drawn, counts):
        """`Sequences` of a list of drawn tuples; updates `counts`."""
        sequences = collect_instances(drawn)
        counts["num_random_nexts"] += int(np.count_nonzero(sequences["next_sentence_labels"]))
        num_special = NUM_SPECIAL if self.rules.next_sentences else NUM_SPECIAL_ALONE
        counts["num_tokens_used"] += int(count_own_tokens(sequences, num_special))
        return sequences

    def serialize(self, sequences, order):
        """Serialize the sequences at `order`, int `[m]`: list of bytes."""
        rules = self.rules
        features = to_features(take(sequences, order), rules.max_seq_length, rules.max_predictions_per_seq)
        return serialize_examples(features)

    def describe(self, counts):
        """Further numbers of a split for the manifest, from its counts."""
        return {"num_tokens_cut": counts["num_tokens_read"] - counts["num_tokens_used"]}

    def summarize(self, manifest):
        """A line about the result, for the log."""
        cut, read = (
            sum(split[name] for split in manifest["splits"].values())
            for name in ("num_tokens_cut", "num_tokens_read")
        )
        return f"{cut} of {read} tokens of text were cut ({100 * cut / read:.1f} %)"

    def warnings_about(self, manifest):
        """Warnings about the text: list of lines."""
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
