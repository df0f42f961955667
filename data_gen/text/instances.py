"""BERT's training sequences: sentence pairs of documents, actual or random next, then masked.

The rules are google-research/bert's, but not the random stream: each document has its own generator, so that
sequences do not depend on the worker.
"""

import dataclasses

import numpy as np

from bert_packed import schema
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences, range_indices
from bert_packed.text.byte_bpe import EncoderVocabulary
from bert_packed.text.masking import MaskingRules, count_predictions, mask_tokens

NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
NUM_SPECIAL_ALONE = 2  # [CLS] A [SEP]
RANDOM_NEXT_RATE = 0.5
USUAL_MASKING = MaskingRules()


@dataclasses.dataclass(frozen=True)
class InstanceRules:
    max_seq_length: int  # S, with [CLS] and [SEP]
    max_predictions_per_seq: int  # P
    masked_lm_prob: float = 0.15  # share of tokens to predict
    short_seq_prob: float = 0.1  # share of documents cut to a random shorter length, of pairs alone
    masking: MaskingRules = USUAL_MASKING
    next_sentences: bool = True  # a sequence is a pair of segments; else sentences of one document


def document_generator(seed, split_index, duplicate, document):
    """The random generator of one pass over one document."""
    # Keys always have four numbers: NumPy pads shorter keys with zeros, so that two keys could be equal
    return np.random.default_rng((seed, split_index, duplicate, document))


def draw_instances(corpus, pairs, documents, vocabulary, rules, seed, split_index):
    """Make the sequences of (duplicate, document) pairs, int `[m, 2]`, one by one.

    Random nexts are from `documents`, int `[d]`, ascending. Yields (duplicate, document), in the order of
    `pairs`, and a tuple for `collect_instances`: tokens int32 `[L]`, A/B int8 `[L]`, prediction positions and
    labels `[p]`, next-sentence label, number of the document's own tokens, which are neither special nor of a
    random next. Only a document of one token without another to pair with has no sequence.
    """
    for duplicate, document in np.asarray(pairs).tolist():
        rng = document_generator(seed, split_index, duplicate, document)
        if rules.next_sentences:
            drawn = draw_segments(corpus, document, documents, rules, rng)
        else:
            drawn = ((*span, 0) for span in cut_document(corpus, document, rules.max_seq_length))
        for *spans, is_random in drawn:
            token_ids, types = join_segments(corpus.token_ids, spans, vocabulary)
            most = rules.max_predictions_per_seq
            num_predictions = count_predictions(len(token_ids), rules.masked_lm_prob, most)
            masked_ids, masked_positions, masked_labels = mask_tokens(
                token_ids,
                vocabulary,
                num_predictions,
                # A line without spaces is one word of bytes: the limit of BERT's words could hide all of it
                num_predictions if isinstance(vocabulary, EncoderVocabulary) else most,
                rules.masking,
                rng,
            )
            own = spans[:2] if is_random else spans  # another document has the random next
            num_own = sum(own[1::2]) - sum(own[::2])
            instance = (masked_ids, types, masked_positions, masked_labels, is_random, num_own)
            yield (duplicate, document), instance


def collect_instances(instances):
    """`Sequences` of a list, not empty, of tuples from `draw_instances`."""
    tokens, type_ids, positions, labels, next_labels, _ = zip(*instances, strict=True)
    return make_sequences(
        BERT_LAYOUT,
        "",
        tokens=np.concatenate(tokens),
        token_type_ids=np.concatenate(type_ids),
        lengths=[len(ids) for ids in tokens],
        prediction_positions=np.concatenate(positions),
        prediction_ids=np.concatenate(labels),
        num_predictions=[len(ids) for ids in labels],
        next_sentence_labels=next_labels,
        record_numbers=np.arange(1, len(tokens) + 1),
    )


def draw_segments(corpus, document, documents, rules, rng):
    """Draw the A and B segments of one document, one by one, as spans of the corpus.

    A chunk consists of sentences up to a target length of S - 3, or with `short_seq_prob` a random shorter
    one. It is cut in two at random. In half of the cases text from a random place of another document
    replaces B, whose sentences begin the next chunk. Pairs over S - 3 tokens are truncated.

        chunk of sentences    [s0 s1 s2]  s3 ...
        actual next           A = s0, B = s1 s2           the next chunk starts with s3
        random next           A = s0, B = other text      the next chunk starts with s1

    A chunk of one sentence gets a random next. Without another document in the split, B is always the actual
    next, and a single sentence is cut in two.

    Yields:
        (a_begin, a_end, b_begin, b_end, is_random_next): positions in `corpus.token_ids`, and 1 for a random
        next. A and B have at least one token each. The caller may use `rng` in between.
    """
    first, last = corpus.document_offsets[document : document + 2].tolist()
    offsets = corpus.sentence_offsets
    max_num_tokens = target = rules.max_seq_length - NUM_SPECIAL
    if rng.random() < rules.short_seq_prob:
        target = int(rng.integers(2, max_num_tokens + 1))
    start = first
    while start < last:
        end = _gather(offsets, start, last, target)
        is_alone = end - start == 1
        cut = start + (1 if is_alone else int(rng.integers(1, end - start)))
        a_begin, a_end, chunk_end = int(offsets[start]), int(offsets[cut]), int(offsets[end])
        is_random = (rng.random() < RANDOM_NEXT_RATE or is_alone) and len(documents) > 1
        if is_random:
            b_begin, b_end = _draw_random_next(corpus, document, documents, target - (a_end - a_begin), rng)
            start = cut  # the replaced sentences begin the next chunk
        else:
            if is_alone and chunk_end - a_begin > 1:
                a_end = int(rng.integers(a_begin + 1, chunk_end))
            b_begin, b_end = a_end, chunk_end
            start = end
        if b_begin == b_end:
            continue  # a single token, and no other document to pair it with
        spans = truncate_pair((a_begin, a_end), (b_begin, b_end), max_num_tokens, rng)
        yield *spans[0], *spans[1], int(is_random)


def cut_document(corpus, document, max_seq_length):
    """Cut a document into sequences of as many whole sentences as fit: RoBERTa's "doc-sentences".

        sentences of 3, 2, 12, 1 tokens, S = 10   ->   3 + 2, 8, 4 + 1      each with [CLS] and [SEP]

    A sentence longer than a sequence is cut, without losing tokens. Yields (begin, end), positions in
    `corpus.token_ids`.
    """
    first, last = corpus.document_offsets[document : document + 2].tolist()
    offsets, room = corpus.sentence_offsets, max_seq_length - NUM_SPECIAL_ALONE
    begin, stop = int(offsets[first]), int(offsets[last])
    while begin < stop:
        # `fits` is the last sentence that ends within the sequence; if none does, the first is cut
        fits = int(np.searchsorted(offsets[first : last + 1], begin + room, side="right")) - 1 + first
        end = int(offsets[fits])
        if end <= begin:
            end = begin + room
        yield begin, end
        begin = end


def truncate_pair(span_a, span_b, max_num_tokens, rng):
    """Shorten the longer of two spans, (begin, end), token by token until both fit; of equal ones B.

        lengths 7 and 3, limit 6   ->   A loses 4

    Each token is lost at the front or the back at random; `rng` is not used where the spans fit.
    """
    length_a, length_b = span_a[1] - span_a[0], span_b[1] - span_b[0]
    excess = length_a + length_b - max_num_tokens
    if excess <= 0:
        return span_a, span_b
    # All losses are drawn at once: their number is fixed, and those at the front are binomial
    to_equal = min(excess, abs(length_a - length_b))
    rest = excess - to_equal  # alternating, B first
    loss_a = rest // 2 + (to_equal if length_a > length_b else 0)
    loss_b = excess - loss_a
    front_a, front_b = int(rng.binomial(loss_a, 0.5)), int(rng.binomial(loss_b, 0.5))
    return (
        (span_a[0] + front_a, span_a[1] - (loss_a - front_a)),
        (span_b[0] + front_b, span_b[1] - (loss_b - front_b)),
    )


def join_segments(corpus_ids, spans, vocabulary):
    """Build [CLS] A [SEP] B [SEP], or [CLS] A [SEP], and its A/B ids: int32 `[L]` and int8 `[L]`.

        A = 7 8, B = 9   ->   [2 7 8 3 9 3]
                              [0 0 0 0 1 1]

    `spans` are (a_begin, a_end, b_begin, b_end) or (a_begin, a_end).
    """
    segments = list(zip(spans[::2], spans[1::2], strict=True))
    length = 1 + sum(end - begin + 1 for begin, end in segments)
    token_ids = np.full(length, vocabulary.sep_id, np.int32)
    type_ids = np.zeros(length, np.int8)
    token_ids[0], place = vocabulary.cls_id, 1
    for number, (begin, end) in enumerate(segments):
        token_ids[place : place + end - begin] = corpus_ids[begin:end]
        type_ids[place:] = number
        place += end - begin + 1
    return token_ids, type_ids


def to_features(sequences, max_seq_length, max_predictions_per_seq):
    """Pad sequences with 0 to the features of BERT's records, `[n, S]`, `[n, P]` or `[n, 1]`."""
    lengths, num_predictions = sequences["lengths"], sequences["num_predictions"]
    predictions = (num_predictions, max_predictions_per_seq)
    return {
        schema.INPUT_IDS: _pad(sequences["tokens"], lengths, max_seq_length),
        schema.INPUT_MASK: _pad(np.ones_like(sequences["tokens"]), lengths, max_seq_length),
        schema.SEGMENT_IDS: _pad(sequences["token_type_ids"], lengths, max_seq_length),
        schema.MASKED_LM_POSITIONS: _pad(sequences["prediction_positions"], *predictions),
        schema.MASKED_LM_IDS: _pad(sequences["prediction_ids"], *predictions),
        schema.MASKED_LM_WEIGHTS: _pad(np.ones(len(sequences["prediction_ids"]), np.float32), *predictions),
        schema.NEXT_SENTENCE_LABELS: sequences["next_sentence_labels"][:, np.newaxis],
    }


def _gather(offsets, start, last, target):
    """End of the sentences from `start` that reach `target` tokens: at least one, at most up to `last`."""
    ends = offsets[start + 1 : min(last, start + target) + 1]  # a sentence has a token, so this reaches it
    reached = int(np.searchsorted(ends, offsets[start] + target))
    return start + min(reached + 1, len(ends))


def _draw_random_next(corpus, document, documents, target, rng):
    """Sentences from a random place of another document, up to `target` tokens: (begin, end)."""
    other = int(rng.integers(len(documents) - 1))
    other += other >= np.searchsorted(documents, document)  # skips the document itself
    first, last = corpus.document_offsets[documents[other] : documents[other] + 2].tolist()
    start = int(rng.integers(first, last))
    end = _gather(corpus.sentence_offsets, start, last, max(target, 1))
    return int(corpus.sentence_offsets[start]), int(corpus.sentence_offsets[end])


def _pad(values, lengths, width):
    """Rows of flat values, padded with 0: [7 8 9] with lengths [1 2], width 3 -> [[7 0 0] [8 9 0]]."""
    padded = np.zeros((len(lengths), width), values.dtype)
    padded.reshape(-1)[range_indices(np.arange(len(lengths)) * width, lengths)] = values
    return padded
