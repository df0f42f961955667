"""A corpus in which every token occurs once, and the sequences that are drawn from it."""

import numpy as np

from bert_packed.records.sequences import to_offsets
from bert_packed.text.tokenization import SPECIAL_TOKENS, Vocabulary
from data_gen.text import instances
from data_gen.text.token_corpus import TokenCorpus

NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)


def make_corpus(documents):
    """A corpus in which every token occurs once, so that its place is known.

    Args:
        documents: List of lists of sentence lengths.
    """
    sentences = [length for document in documents for length in document]
    token_ids = np.arange(sum(sentences), dtype=np.int32) + NUM_SPECIAL_TOKENS
    corpus = TokenCorpus(token_ids, to_offsets([len(d) for d in documents]), to_offsets(sentences))
    words = [f"{'##' if i % 3 == 1 else ''}w{i}" for i in range(len(token_ids))]
    return corpus, Vocabulary((*SPECIAL_TOKENS, *words))


def random_documents(seed, num_documents=20, max_sentence_length=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, max_sentence_length, rng.integers(1, 40)).tolist() for _ in range(num_documents)]


def make(corpus, vocabulary, rules, num_duplicates=1, documents=None, seed=1):
    documents = np.arange(corpus.num_documents) if documents is None else np.asarray(documents)
    pairs = [(duplicate, document) for duplicate in range(num_duplicates) for document in documents]
    return make_pairs(corpus, pairs, documents, vocabulary, rules, seed)


def make_pairs(corpus, pairs, documents, vocabulary, rules, seed, split_index=0):
    """`Sequences` of (duplicate, document) pairs."""
    drawn = instances.draw_instances(corpus, pairs, documents, vocabulary, rules, seed, split_index)
    return instances.collect_instances([instance for _, instance in drawn])


def rows(sequences):
    """Yield (tokens, token_type_ids, positions, labels) of each sequence."""
    for i in range(len(sequences)):
        tokens = slice(*sequences.offsets("tokens")[i : i + 2])
        masked = slice(*sequences.offsets("prediction_ids")[i : i + 2])
        yield (
            sequences["tokens"][tokens],
            sequences["token_type_ids"][tokens],
            sequences["prediction_positions"][masked],
            sequences["prediction_ids"][masked],
        )
