"""Segments come from the right documents, and nothing is lost."""

import numpy as np
import pytest
from drawn_instances import make, make_corpus, make_pairs, random_documents, rows
from unpacked_records import PREDICTIONS, load, write_features

from bert_packed import schema
from bert_packed.records.sequences import BERT_LAYOUT
from data_gen.text import instances
from data_gen.text.instances import InstanceRules

TOKENS = (schema.INPUT_IDS, schema.SEGMENT_IDS)


def draw_all(corpus, documents, rules, seed=0):
    """Yield (document, segments) for every document."""
    for document in documents:
        rng = instances.document_generator(seed, 0, 0, document)
        yield document, list(instances.draw_segments(corpus, document, np.asarray(documents), rules, rng))


def document_of(corpus, position):
    sentence = np.searchsorted(corpus.sentence_offsets, position, side="right") - 1
    return int(np.searchsorted(corpus.document_offsets, sentence, side="right") - 1)


@pytest.mark.parametrize("max_seq_length", [8, 33, 128])
def test_segments_come_from_the_right_documents(max_seq_length):
    corpus, _ = make_corpus(random_documents(0))
    rules = InstanceRules(max_seq_length, 20)
    split = [1, 3, 4, 9, 15]
    seen = {0: 0, 1: 0}
    for document, segments in draw_all(corpus, split, rules):
        assert segments
        for a_begin, a_end, b_begin, b_end, is_random in segments:
            assert a_begin < a_end and b_begin < b_end
            assert a_end - a_begin + b_end - b_begin <= max_seq_length - 3
            documents_a = {document_of(corpus, a_begin), document_of(corpus, a_end - 1)}
            documents_b = {document_of(corpus, b_begin), document_of(corpus, b_end - 1)}
            assert documents_a == {document}
            assert len(documents_b) == 1 and documents_b <= set(split)
            assert (documents_b == {document}) == (not is_random)
            assert is_random or a_end <= b_begin
            seen[is_random] += 1
    assert min(seen.values()) > 0


@pytest.mark.parametrize("short_seq_prob", [0.0, 1.0])
def test_every_sentence_is_used_once(short_seq_prob):
    # Sentences of one token fill the target exactly: nothing is truncated, so nothing may be missing.
    corpus, _ = make_corpus([[1] * length for length in (1, 2, 7, 40, 100, 101)])
    rules = InstanceRules(16, 3, short_seq_prob=short_seq_prob)
    uses = np.zeros(len(corpus.token_ids), int)
    for _, segments in draw_all(corpus, range(6), rules):
        for a_begin, a_end, b_begin, b_end, is_random in segments:
            uses[a_begin:a_end] += 1
            if not is_random:
                uses[b_begin:b_end] += 1
                assert b_begin == a_end
    assert (uses == 1).all()


def test_a_single_document_has_actual_nexts_only():
    rules = InstanceRules(16, 5)
    corpus, _ = make_corpus([[4] * 30])
    ((_, segments),) = draw_all(corpus, [0], rules)
    assert len(segments) > 3
    assert all(not is_random and b_begin >= a_end for _, a_end, b_begin, _, is_random in segments)
    corpus, _ = make_corpus([[6]])
    ((_, segments),) = draw_all(corpus, [0], rules)
    ((a_begin, a_end, b_begin, b_end, is_random),) = segments
    assert (a_begin, b_end, is_random) == (0, 6, 0) and a_end == b_begin
    corpus, _ = make_corpus([[1]])
    ((_, segments),) = draw_all(corpus, [0], rules)
    assert segments == []


def truncate_slowly(length_a, length_b, limit):
    """Truncate token by token, as google-research/bert describes it: the lengths that are left."""
    while length_a + length_b > limit:
        if length_a > length_b:
            length_a -= 1
        else:
            length_b -= 1
    return length_a, length_b


def test_truncation_equals_the_plain_loop():
    rng = np.random.default_rng(0)
    fronts = []
    for length_a, length_b, limit in rng.integers([1, 1, 2], [30, 30, 40], (500, 3)).tolist():
        span_a, span_b = instances.truncate_pair((0, length_a), (100, 100 + length_b), limit, rng)
        lengths = span_a[1] - span_a[0], span_b[1] - span_b[0]
        assert lengths == truncate_slowly(length_a, length_b, limit)
        assert span_a[0] >= 0 and span_a[1] <= length_a
        assert span_b[0] >= 100 and span_b[1] <= 100 + length_b
        fronts.append((span_a[0], length_a - lengths[0]))
    front, removed = np.sum(fronts, axis=0)
    assert 0.45 < front / removed < 0.55  # half of the tokens go at the front


def restored(tokens, positions, labels):
    tokens = tokens.copy()
    tokens[positions] = labels
    return tokens


@pytest.mark.parametrize("max_seq_length", [8, 33, 128])
def test_without_next_sentences_every_token_is_used_once(max_seq_length):
    """Sentences in a row, [CLS] before and [SEP] after, as many whole ones as fit."""
    corpus, vocabulary = make_corpus(random_documents(4, max_sentence_length=50))
    rules = InstanceRules(max_seq_length, 20, next_sentences=False)
    sequences = make(corpus, vocabulary, rules)
    assert sequences["lengths"].max() == max_seq_length and not sequences["next_sentence_labels"].any()
    text = []
    for tokens, types, positions, labels in rows(sequences):
        whole = restored(tokens, positions, labels)
        assert not types.any() and len(whole) <= max_seq_length
        assert (whole[0], whole[-1]) == (vocabulary.cls_id, vocabulary.sep_id)
        text.append(whole[1:-1])
    # every token occurs once in the corpus, so that this is their order too
    np.testing.assert_array_equal(np.concatenate(text), corpus.token_ids)
    sentences, ends = set(corpus.sentence_offsets.tolist()), np.cumsum([len(part) for part in text])
    ends_of_documents = set(corpus.sentence_offsets[corpus.document_offsets[1:]].tolist())
    num_full = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        later = [stop for stop in sentences if end < stop <= begin + max_seq_length - 2]
        if end in sentences:  # no further sentence fits, or there is none
            assert not later or end in ends_of_documents
        else:  # one that fits no sequence
            assert end - begin == max_seq_length - 2 and not later
            num_full += 1
        assert not any(begin < stop < end for stop in ends_of_documents)
    assert (num_full > 0) == (max_seq_length < 50)


def test_a_document_does_not_depend_on_the_others_asked_for():
    corpus, vocabulary = make_corpus(random_documents(3))
    rules = InstanceRules(64, 10)
    documents = np.arange(corpus.num_documents)
    whole = make_pairs(corpus, [(0, 4), (1, 4), (0, 7)], documents, vocabulary, rules, 5)
    alone = make_pairs(corpus, [(0, 7)], documents, vocabulary, rules, 5)
    assert np.array_equal(whole["tokens"][-len(alone["tokens"]) :], alone["tokens"])
    duplicates = [
        make_pairs(corpus, [(d, 4)], documents, vocabulary, rules, 5, split)["tokens"]
        for d, split in [(0, 0), (1, 0), (0, 1)]
    ]
    assert not np.array_equal(duplicates[0], duplicates[1])
    assert not np.array_equal(duplicates[0], duplicates[2])


def test_features_are_padded_and_complete(tmp_path):
    corpus, vocabulary = make_corpus(random_documents(4))
    sequences = make(corpus, vocabulary, InstanceRules(40, 9))
    features = instances.to_features(sequences, 40, 9)
    sizes = {"S": 40, "P": 9, 1: 1}
    wanted = {name: (len(sequences), sizes[kind]) for name, kind in schema.UNPACKED_LENGTHS.items()}
    assert {name: values.shape for name, values in features.items()} == wanted
    assert features[schema.MASKED_LM_WEIGHTS].dtype == np.float32
    found = load(write_features(tmp_path / "a.tfrecord", features))
    for name in BERT_LAYOUT:
        np.testing.assert_array_equal(found[name], sequences[name], name)
    for names, used in (TOKENS, schema.INPUT_MASK), (PREDICTIONS, schema.MASKED_LM_WEIGHTS):
        assert not any(features[name][features[used] == 0].any() for name in names)


def test_pinned_sequence():
    corpus, vocabulary = make_corpus([[3, 4, 2], [5, 5]])
    sequences = make(corpus, vocabulary, InstanceRules(16, 2), seed=12345)
    tokens, types, positions, labels = next(rows(sequences))
    assert tokens.tolist() == [2, 5, 6, 4, 8, 9, 4, 11, 3, 12, 13, 3]
    assert types.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert (positions.tolist(), labels.tolist()) == ([3, 6], [7, 10])
    assert sequences["next_sentence_labels"][0] == 0


def test_half_of_the_nexts_are_random():
    corpus, _ = make_corpus([[5] * 200 for _ in range(40)])
    rules = InstanceRules(64, 10)
    is_random = [s[-1] for _, segments in draw_all(corpus, range(40), rules) for s in segments]
    # half of the n-th chunks have one; the last chunk of a document may be one sentence and must be random
    assert 0.45 < np.mean(is_random) < 0.58
