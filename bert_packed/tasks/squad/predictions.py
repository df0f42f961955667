"""Answers by a model's logits: the best spans of all windows of a question, as text of the context.

run_squad.py joins WordPieces and searches for them in the text. Here every token has its characters, by which
an answer is cut from the context, without white space around it.
"""

import dataclasses
from pathlib import Path

import numpy as np

from bert_packed.core.storage import write_json

ANSWERS_FILE, NBEST_FILE, NULL_ODDS_FILE = "predictions.json", "nbest_predictions.json", "null_odds.json"
FILES = (ANSWERS_FILE, NBEST_FILE, NULL_ODDS_FILE)
SPANS_PER_ANSWER = 4  # several spans may read alike
NO_WINDOW_ODDS = 1e9  # a context without a token surely has no answer


@dataclasses.dataclass(frozen=True)
class Span:
    """A candidate answer."""

    window: int  # index
    first: int  # token within the window
    last: int
    start_logit: float
    end_logit: float

    @property
    def score(self):
        return self.start_logit + self.end_logit


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Answers by question id."""

    answers: dict[str, str]  # "" is no answer
    nbest: dict[str, list[dict]]  # `text`, `probability`, `start_logit`, `end_logit`, the best first
    null_odds: dict[str, float]  # v2.0: score of no answer less that of the best answer; {} for v1.1


def extract(
    question_set,
    windows,
    logits,
    n_best_size=20,
    max_answer_length=30,
    version_2_with_negative=False,
    null_score_diff_threshold=0.0,
):
    """The `Predictions` for all questions, including those without a window.

    `windows` are `windows.Windows` of the question set, n sequences; `logits` a list of n float arrays
    `[2, tokens of the sequence]`, start and end; the others are settings of `SquadConfig`. The
    score of no answer is the lowest of [CLS] over the question's windows.
    """
    by_question = [[] for _ in question_set.questions]
    null = [None] * len(by_question)
    for number, window in enumerate(windows.windows):
        start, end = np.asarray(logits[number], np.float32)
        spans = best_spans(number, window, start, end, SPANS_PER_ANSWER * n_best_size, max_answer_length)
        by_question[window.question_index].extend(spans)
        null_span = Span(number, -1, -1, float(start[0]), float(end[0]))
        lowest = null[window.question_index]
        if lowest is None or null_span.score < lowest.score:
            null[window.question_index] = null_span
    answers, nbest, null_odds = {}, {}, {}
    for question, spans, null_span in zip(question_set.questions, by_question, null, strict=True):
        found = _distinct(spans, question_set.contexts[question.context_index], question, windows)
        answer = next(iter(found), "")
        if version_2_with_negative:
            odds = null_span.score - found[answer].score if null_span and found else NO_WINDOW_ODDS
            null_odds[question.id] = odds
            answer = "" if odds > null_score_diff_threshold else answer
            found = dict(list(found.items())[:n_best_size])
            if null_span:
                found[""] = null_span
        nbest[question.id] = _with_probabilities(found, n_best_size + version_2_with_negative)
        answers[question.id] = answer
    return Predictions(answers, nbest, null_odds)


def best_spans(number, window, start_logits, end_logits, num_spans, max_answer_length):
    """The best of all spans of a window: list of `Span`; of equal ones the shorter, then the earlier.

    run_squad.py combines the best starts and ends. A span begins at a token whose `is_best` is True.

        start [2 5 1], end [1 0 4]   ->   scores by length - 1 and first token
                                          [ 3    5    5  ]
                                          [ 2    9   -inf]
                                          [ 6   -inf -inf]
    """
    size = window.num_tokens
    inside = slice(window.first_token, window.first_token + size)
    start = np.where(window.is_best, start_logits[inside], -np.inf)
    end = end_logits[inside]
    longest = min(max_answer_length, size)
    scores = np.full((longest, size), -np.inf)  # [length - 1, first token]
    for more in range(longest):
        scores[more, : size - more] = start[: size - more] + end[more:]
    flat = scores.reshape(-1)
    order = np.argsort(-flat, kind="stable")[:num_spans]
    spans = []
    for place in order[np.isfinite(flat[order])].tolist():
        more, first = divmod(place, size)
        spans.append(Span(number, first, first + more, float(start[first]), float(end[first + more])))
    return spans


def _distinct(spans, context, question, windows):
    """Dict from text to the best span that reads so, the best first; None for no text."""
    places = windows.token_places[question.context_index]
    found = {}
    for span in sorted(spans, key=lambda span: -span.score):
        offset = windows.windows[span.window].token_start
        text = context[places[span.first + offset][0] : places[span.last + offset][1]].strip()
        found.setdefault(text, span)
    return found


def _with_probabilities(found, limit):
    if not found:
        return [{"text": "", "probability": 1.0, "start_logit": 0.0, "end_logit": 0.0}]
    ordered = sorted(found.items(), key=lambda item: -item[1].score)[:limit]
    scores = np.array([span.score for _, span in ordered])
    weights = np.exp(scores - scores.max())
    return [
        {
            "text": text,
            "probability": float(weight),
            "start_logit": span.start_logit,
            "end_logit": span.end_logit,
        }
        for (text, span), weight in zip(ordered, weights / weights.sum(), strict=True)
    ]


def write(folder, predictions):
    """Write `predictions.json`, `nbest_predictions.json` and, for v2.0, `null_odds.json` to a folder."""
    folder = Path(folder)
    write_json(folder / ANSWERS_FILE, predictions.answers)
    write_json(folder / NBEST_FILE, predictions.nbest)
    if predictions.null_odds:
        write_json(folder / NULL_ODDS_FILE, predictions.null_odds)
