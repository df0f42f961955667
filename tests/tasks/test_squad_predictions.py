"""Answers from logits: the best spans out of all, windows with most context, text as in the context."""

import itertools
import json

import numpy as np
import pytest
from squad_files import TOKENIZER, VOCABULARY, entry, write

from bert_packed.tasks.squad import predictions as squad_predictions
from bert_packed.tasks.squad.files import read_squad
from bert_packed.tasks.squad.predictions import best_spans, extract
from bert_packed.tasks.squad.windows import Window, make_windows


def read(tmp_path, context, *entries, length=64, stride=32):
    questions = read_squad(write(tmp_path / "a.json", (context, entries)), False)
    return questions, make_windows(questions, TOKENIZER, length, stride, 8)


def blank(windows):
    return [np.zeros((2, int(length)), np.float32) for length in windows.sequences["lengths"]]


def plain_best_spans(window, start, end, num, longest):
    found = []
    for first, last in itertools.product(range(window.num_tokens), repeat=2):
        if window.is_best[first] and first <= last < first + longest:
            place = window.first_token
            found.append((float(start[place + first]) + float(end[place + last]), first, last))
    return sorted(found, key=lambda item: (-item[0], item[2] - item[1], item[1]))[:num]


@pytest.mark.parametrize(("num", "longest"), [(5, 30), (50, 3), (500, 7), (1, 1)])
def test_best_spans_equal_a_loop(num, longest):
    rng = np.random.default_rng(num)
    window = Window(0, 4, 0, 12, rng.random(12) < 0.7)
    start, end = rng.integers(-3, 4, (2, 17)).astype(np.float32)  # whole numbers: ties
    spans = best_spans(0, window, start, end, num, longest)
    found = [(span.score, span.first, span.last) for span in spans]
    assert found == plain_best_spans(window, start, end, num, longest)


def test_answer_is_cut_from_the_original_text(tmp_path):
    context = "Who wrote  the\tFIRST Caf\u00e9, in (1843)?"
    questions, windows = read(tmp_path, context, entry("1", "what?"))
    logits = blank(windows)
    tokens = [VOCABULARY.tokens[token] for token in windows.sequences["tokens"]]
    logits[0][0, tokens.index("the")] = 5
    logits[0][1, tokens.index("cafe")] = 5
    found = extract(questions, windows, logits, n_best_size=3)
    assert found.answers == {"1": "the\tFIRST Caf\u00e9"}
    assert found.nbest["1"][0]["text"] == "the\tFIRST Caf\u00e9"
    assert len(found.nbest["1"]) == 3
    assert sum(entry["probability"] for entry in found.nbest["1"]) == pytest.approx(1.0)
    assert found.null_odds == {}


def test_tokens_of_the_question_are_no_answers(tmp_path):
    questions, windows = read(tmp_path, "the first program", entry("1", "who wrote?"))
    logits = blank(windows)
    logits[0][:, :5] = 9  # [CLS] who wrote ? [SEP]
    logits[0][:, -1] = 9  # [SEP]
    logits[0][:, 6] = 1
    assert extract(questions, windows, logits).answers == {"1": "first"}


def test_of_two_windows_the_one_with_more_context_speaks(tmp_path):
    context = "a the first program wrote in 1843 cafe"
    # [CLS] who [SEP] window [SEP]: windows of six tokens, (0, 6) and (4, 4)
    questions, windows = read(tmp_path, context, entry("1", "who"), length=10, stride=4)
    assert [(w.token_start, w.num_tokens) for w in windows.windows] == [(0, 6), (4, 4)]
    logits = blank(windows)
    logits[0][:, 3 + 5] = 9  # "in", at the edge of window 0, has its context in window 1
    assert not windows.windows[0].is_best[5] and windows.windows[1].is_best[1]
    assert extract(questions, windows, logits).answers["1"] != "in"
    logits[1][:, 3 + 1] = 8
    assert extract(questions, windows, logits).answers["1"] == "in"


def test_equal_texts_are_one_answer(tmp_path):
    questions, windows = read(tmp_path, "1843 in 1843", entry("1", "who"))
    logits = blank(windows)
    logits[0][:, 3], logits[0][:, 5] = 3, 2
    # Both spans that read 1843 are better than the second answer
    found = extract(questions, windows, logits, n_best_size=2, max_answer_length=1)
    assert [answer["text"] for answer in found.nbest["1"]] == ["1843", "in"]
    assert found.nbest["1"][0]["start_logit"] == 3


def test_no_answer_where_it_scores_higher(tmp_path):
    questions, windows = read(tmp_path, "the first program", entry("1", "who"))
    logits = blank(windows)
    logits[0][:, 0] = 2.0  # [CLS]: score 4
    logits[0][:, 4] = 1.5  # "first": score 3
    found = extract(questions, windows, logits, version_2_with_negative=True)
    assert found.answers == {"1": ""} and found.null_odds == {"1": 1.0}
    assert [answer["text"] for answer in found.nbest["1"]][:2] == ["", "first"]
    patient = extract(questions, windows, logits, version_2_with_negative=True, null_score_diff_threshold=1.0)
    assert patient.answers == {"1": "first"}
    assert extract(questions, windows, logits).answers == {"1": "first"}


def test_no_answer_takes_the_window_that_doubts_it_most(tmp_path):
    context = "a the first program wrote in 1843 cafe"
    questions, windows = read(tmp_path, context, entry("1", "who"), length=10, stride=4)
    logits = blank(windows)
    logits[0][:, 0], logits[1][:, 0] = 3, -1
    found = extract(questions, windows, logits, n_best_size=2, version_2_with_negative=True)
    assert found.null_odds == {"1": -2.0}
    texts = [answer["text"] for answer in found.nbest["1"]]
    assert len(texts) == 3 and texts[-1] == ""  # listed beside the best two, though worse than a third


def test_context_without_a_word(tmp_path):
    path = write(tmp_path / "a.json", (" ", [entry("1", "who")]), ("first", [entry("2", "who")]))
    questions = read_squad(path, False)
    windows = make_windows(questions, TOKENIZER, 32, 8, 8)
    found = extract(questions, windows, blank(windows), version_2_with_negative=True)
    assert found.answers["1"] == "" and found.nbest["1"][0]["text"] == ""
    assert found.null_odds["1"] > 1e6
    assert extract(questions, windows, blank(windows)).answers == {"1": "", "2": "first"}


def test_files(tmp_path):
    questions, windows = read(tmp_path, "the first caf\u00e9", entry("1", "who"))
    found = extract(questions, windows, blank(windows), version_2_with_negative=True)
    squad_predictions.write(tmp_path, found)
    assert json.loads((tmp_path / "predictions.json").read_text()) == found.answers
    assert json.loads((tmp_path / "nbest_predictions.json").read_text()) == found.nbest
    assert json.loads((tmp_path / "null_odds.json").read_text()) == found.null_odds
