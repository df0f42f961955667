"""How documents become BERT's records: sentence pairs, masked, padded to one length."""

import dataclasses

import numpy as np

from bert_packed.records.example_bytes import serialize_examples
from bert_packed.records.sequences import take
from bert_packed.text import tokenization
from bert_packed.text.vocabularies import WordPieces
from data_gen.text.corpus import TextDocuments
from data_gen.text.instances import (
    NUM_SPECIAL,
    NUM_SPECIAL_ALONE,
    InstanceRules,
    collect_instances,
    count_own_tokens,
    draw_instances,
    to_features,
)
from data_gen.text.token_corpus import encode_documents, join_corpora, open_corpus

MOST_CUT = (
    0.25  # share of the text's tokens; of prose, a sentence a line, it is 0.03 at length 512, 0.11 at 128
)
MIN_LABELS = 20  # sequences of a split whose labels are looked at
FORMAT_RULE = (
    "warning: text must have one sentence a line and a blank line between documents, or be JSON lines with "
    "`text`, whose sentences are found here"
)


@dataclasses.dataclass(frozen=True)
class BertRecords:
    """BERT's records; `text_records.TextRecords` says what each member is for.

    Attributes:
        vocabulary: `WordPieces`.
        rules: `InstanceRules`.
        num_passes: Over the training documents, each with other segments and masks.
    """

    vocabulary: WordPieces
    rules: InstanceRules
    num_passes: int

    @property
    def max_seq_length(self):
        """See `TextRecords`."""
        return self.rules.max_seq_length

    def open_texts(self, paths):
        """See `TextRecords`: a sentence at a time."""
        return TextDocuments(paths)

    def join_sentences(self, sentences):
        """See `TextRecords`: as they are."""
        return sentences

    def tokenize(self, texts, vocab_path, folder):
        """See `TextRecords`."""
        tokenizer = self.vocabulary.load(vocab_path).tokenizer
        return encode_documents(texts, tokenizer, folder).num_documents

    def join(self, folders, folder):
        """See `TextRecords`."""
        join_corpora(folders, folder)

    def open_corpus(self, folder):
        """See `TextRecords`: `TokenCorpus`."""
        return open_corpus(folder)

    def load(self, vocab_path):
        """See `TextRecords`: `Vocabulary`."""
        return tokenization.load_vocab(vocab_path)

    def draw(self, corpus, pairs, documents, vocabulary, seed, split_index, counts):
        """See `TextRecords`."""
        counts["num_tokens_read"] += int(corpus.document_lengths(pairs[:, 1]).sum())
        return draw_instances(corpus, pairs, documents, vocabulary, self.rules, seed, split_index)

    def collect(self, drawn, counts):
        """See `TextRecords`: `Sequences`."""
        sequences = collect_instances(drawn)
        counts["num_random_nexts"] += int(np.count_nonzero(sequences["next_sentence_labels"]))
        num_special = NUM_SPECIAL if self.rules.next_sentences else NUM_SPECIAL_ALONE
        counts["num_tokens_used"] += int(count_own_tokens(sequences, num_special))
        return sequences

    def serialize(self, sequences, order):
        """See `TextRecords`."""
        rules = self.rules
        features = to_features(take(sequences, order), rules.max_seq_length, rules.max_predictions_per_seq)
        return serialize_examples(features)

    def new_counts(self):
        """Random nexts; tokens of the documents, once for every pass; those of them that a sequence has."""
        return {"num_random_nexts": 0, "num_tokens_read": 0, "num_tokens_used": 0}

    def describe(self, counts):
        """See `TextRecords`."""
        return {"num_tokens_cut": counts["num_tokens_read"] - counts["num_tokens_used"]}

    def summarize(self, manifest):
        """See `TextRecords`."""
        cut, read = (
            sum(split[name] for split in manifest["splits"].values())
            for name in ("num_tokens_cut", "num_tokens_read")
        )
        return f"{cut} of {read} tokens of text were cut ({100 * cut / read:.1f} %)"

    def warnings_about(self, manifest):
        """See `TextRecords`."""
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
            # few labels are equal by chance, twenty in one split of half a million
            if self.rules.next_sentences and label in (0, 1) and content["num_sequences"] >= MIN_LABELS:
                is_one = content["num_documents"] == 1
                cause = "the text is one document" if is_one else "no document has a next line"
                lines.append(
                    f"warning: all next_sentence_labels of split {split} are {label:.0f}, from which nothing "
                    f"is learnt: {cause}"
                )
        return [*lines, FORMAT_RULE] if lines else []
