"""Sequences for questions: BERT's windows over the context, every token with its characters in the text.

    context   Ada wrote the first program in 1843 .     window of 6 tokens, stride 4
    window 0  Ada wrote the first program in
    window 1                      program in 1843 .
    is best   1   1     1   1     1       0             "in" has more context around it in window 1
                                  0       1  1    1

A sequence is `[CLS] question [SEP] window [SEP]`. Windows, strides, truncation and the rule of the most
context are those of google-research/bert's run_squad.py. An answer's tokens are those that overlap its
characters, where run_squad.py searches for them among the pieces of its words;
`tests/tasks/test_squad_windows.py` compares the two.
"""

import dataclasses

import numpy as np

from bert_packed.records.sequences import BERT_LAYOUT, Sequences, make_sequences

NUM_SPECIAL = 3  # [CLS], and [SEP] after question and window
ENCODE_AT_ONCE = 1024  # contexts


@dataclasses.dataclass(frozen=True)
class Window:
    """Position of a sequence's window."""

    question_index: int  # into `QuestionSet.questions`
    first_token: int  # place in the sequence of the window's first token: 2 + question tokens
    token_start: int  # the same token's place among the context's tokens
    num_tokens: int
    # bool `[num_tokens]`: no other window has more context around the token, which is not just white space
    is_best: np.ndarray


@dataclasses.dataclass(frozen=True)
class Windows:
    """All sequences of a question set.

    `answer_spans` are int32 `[n, 2]`, first and last token of the answer within its sequence; 0 0, which is
    [CLS], where the window holds no whole answer. `token_places` are a list by context of int32
    `[tokens, 2]`: first character of each, and one past its last, white space included.
    """

    sequences: Sequences  # n, without predictions
    windows: list[Window]
    answer_spans: np.ndarray
    token_places: list[np.ndarray]
    num_truncated: int  # questions that were longer than the limit
    num_empty: int  # questions whose context is white space, and has no window


def make_windows(question_set, tokenizer, max_seq_length, doc_stride, max_query_length, path=""):
    """Cut the contexts of all questions into windows: `Windows`, in the order of the questions.

    `tokenizer` is a `tokenization.TextTokenizer`; the numbers are settings of `SquadConfig`. As in
    transformers' run_qa, white space before a question is left out.
    """
    contexts = _encode_with_places(tokenizer, question_set.contexts)
    queries = tokenizer.encode([question.text.lstrip() for question in question_set.questions])
    tokens, type_ids, lengths, windows, spans = [], [], [], [], []
    num_empty = 0
    for index, (question, query) in enumerate(zip(question_set.questions, queries, strict=True)):
        ids, places, is_visible = contexts[question.context_index]
        query = query[:max_query_length]
        num_empty += not len(ids)
        answer = answer_tokens(question, places)
        head = [tokenizer.cls_id, *query, tokenizer.sep_id]
        starts = window_starts(len(ids), max_seq_length - len(query) - NUM_SPECIAL, doc_stride)
        for (start, size), is_best in zip(starts, most_context(starts), strict=True):
            tokens.extend((*head, *ids[start : start + size], tokenizer.sep_id))
            type_ids.extend([0] * len(head) + [1] * (size + 1))
            lengths.append(len(head) + size + 1)
            begins = is_best & is_visible[start : start + size]
            windows.append(Window(index, len(head), start, size, begins))
            spans.append(_span_in_window(answer, start, size, len(head)))
    return Windows(
        make_sequences(
            BERT_LAYOUT,
            str(path),
            tokens=tokens,
            token_type_ids=type_ids,
            lengths=lengths,
            record_numbers=[window.question_index + 1 for window in windows],
        ),
        windows,
        np.array(spans, np.int32).reshape(-1, 2),
        [places for _, places, _ in contexts],
        sum(len(query) > max_query_length for query in queries),
        num_empty,
    )


def window_starts(num_tokens, size, stride):
    """List of windows, (start, length): 8 tokens, size 6, stride 4 -> [(0, 6), (4, 4)]."""
    found, start = [], 0
    while start < num_tokens:
        length = min(size, num_tokens - start)
        found.append((start, length))
        if start + length == num_tokens:
            break
        start += min(length, stride)
    return found


def most_context(starts):
    """Tokens that have the most context in a window: a bool array for each window.

    The score is run_squad.py's: the smaller number of tokens, to the left or to the right, plus a hundredth
    of the window's length. The first window of equal scores counts.
    """
    if len(starts) == 1:
        return [np.ones(starts[0][1], bool)]
    total = max((start + size for start, size in starts), default=0)
    # Each token keeps its best window: a table of windows times tokens is a gigabyte for a context of 10^5
    best, best_scores = np.zeros(total, np.int32), np.full(total, -1.0)
    for row, (start, size) in enumerate(starts):
        left, inside = np.arange(size), slice(start, start + size)
        scores = np.minimum(left, left[::-1]) + 0.01 * size
        best[inside] = np.where(scores > best_scores[inside], row, best[inside])
        best_scores[inside] = np.maximum(scores, best_scores[inside])
    return [best[start : start + size] == row for row, (start, size) in enumerate(starts)]


def answer_tokens(question, places):
    """First and last token that overlap the question's first answer; None where it has none.

    places of "ada wrote" [(0 3) (4 9)], answer "wrote" at 4   ->   (1, 1)

    White space around the answer does not count: it may be a token.
    """
    if not question.answers:
        return None
    text, start = question.answers[0]
    start, text = start + len(text) - len(text.lstrip()), text.strip()
    first = int(np.searchsorted(places[:, 1], start, side="right"))
    last = int(np.searchsorted(places[:, 0], start + len(text), side="left")) - 1
    return (first, last) if first <= last else None


def _span_in_window(answer, start, size, first_token):
    """The answer's tokens within the sequence, or (0, 0), as run_squad.py labels windows without it."""
    if answer is None or answer[0] < start or answer[1] >= start + size:
        return 0, 0
    return answer[0] - start + first_token, answer[1] - start + first_token


def _encode_with_places(tokenizer, texts):
    """Token ids and places of each text, and bool `[tokens]`: the token is more than white space."""
    found = []
    for first in range(0, len(texts), ENCODE_AT_ONCE):
        part = list(texts[first : first + ENCODE_AT_ONCE])
        for text, (ids, places) in zip(part, tokenizer.encode_with_places(part), strict=True):
            is_visible = np.array([bool(text[a:b].strip()) for a, b in places.tolist()], bool)
            if not is_visible.any():  # nothing to answer with
                ids, places, is_visible = ids[:0], places[:0], is_visible[:0]
            found.append((ids, places, is_visible))
    return found
