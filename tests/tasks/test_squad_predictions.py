"""Answers from logits: the best spans out of all, windows with most context, text as in the context."""

import itertools
import json

import numpy as np
import pytest
from squad_files import TOKENIZER, entry, write

from bert_packed.tasks.squad import predictions as squad_predictions
from bert_packed.tasks.squad.files import read_squad
from bert_packed.tasks.squad.predictions import best_spans, extract
from bert_packed.tasks.squad.windows import Window, make_windows


def extracted(tmp_path, contexts, given, length=64, stride=32, **options):
    """The `Predictions` of the question "who" on each context, by numbers from 1.

    `given` are logits that are not 0: tuples of window, side, token and value.
    """
    made = [(context, [entry(str(number), "who")]) for number, context in enumerate(contexts, 1)]
    questions = read_squad(write(tmp_path / "a.json", *made), False)
    windows = make_windows(questions, TOKENIZER, length, stride, 8)
    logits = [np.zeros((2, int(size)), np.float32) for size in windows.sequences["lengths"]]
    for window, side, token, value in given:
        logits[window][side, token] = value
    return extract(questions, windows, logits, **options)


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


START, END, BOTH = 0, 1, slice(2)
# Sequences are [CLS] who [SEP] window [SEP]. Windows of this have six tokens, (0, 6), and four, (4, 4)
LONG, CUT = "a the first program wrote in 1843 cafe", {"length": 10, "stride": 4}
FIRST, NULL = [(0, BOTH, 4, 1.5)], [(0, BOTH, 0, 2.0)]  # scores 3 and 4
VERSION_2 = {"version_2_with_negative": True}


@pytest.mark.parametrize(
    ("context", "given", "options", "answer"),
    [
        # Characters are those of the text
        ("Who wrote  the\tFIRST Caf\u00e9!", [(0, START, 5, 5), (0, END, 7, 5)], {}, "the\tFIRST Caf\u00e9"),
        # The question and special tokens are no answers
        ("the first one", [(0, BOTH, slice(3), 9), (0, BOTH, -1, 9), *FIRST], {}, "first"),
        # "in", at the edge of the first window, has its context in the second, where answers begin with it
        (LONG, [(0, BOTH, 8, 9)], CUT, "wrote in"),
        (LONG, [(0, BOTH, 8, 9), (1, BOTH, 4, 8)], CUT, "in"),
        # No answer, where it scores higher
        ("the first program", [*FIRST, *NULL], VERSION_2, ""),
        ("the first program", [*FIRST, *NULL], {**VERSION_2, "null_score_diff_threshold": 1.0}, "first"),
        ("the first program", [*FIRST, *NULL], {}, "first"),
    ],
)
def test_answers(tmp_path, context, given, options, answer):
    assert extracted(tmp_path, [context], given, **options).answers == {"1": answer}


def test_equal_texts_are_one_answer(tmp_path):
    """Both spans that read 1843 are better than the second answer."""
    given = [(0, BOTH, 3, 3), (0, BOTH, 5, 2)]
    found = extracted(tmp_path, ["1843 in 1843"], given, n_best_size=2, max_answer_length=1)
    assert [answer["text"] for answer in found.nbest["1"]] == ["1843", "in"]
    assert found.nbest["1"][0]["start_logit"] == 3 and found.null_odds == {}
    assert sum(answer["probability"] for answer in found.nbest["1"]) == pytest.approx(1.0)


def test_no_answer_takes_the_window_that_doubts_it_most(tmp_path):
    given = [(0, BOTH, 0, 3), (1, BOTH, 0, -1)]
    found = extracted(tmp_path, [LONG], given, **CUT, **VERSION_2, n_best_size=2)
    assert found.null_odds == {"1": -2.0}
    texts = [answer["text"] for answer in found.nbest["1"]]
    assert len(texts) == 3 and texts[-1] == ""  # listed beside the best two, though worse than a third


def test_a_context_without_a_word_and_files(tmp_path):
    found = extracted(tmp_path, [" ", "first"], [], **VERSION_2)
    assert found.answers["1"] == "" and found.nbest["1"][0]["text"] == ""
    assert found.null_odds["1"] > 1e6
    squad_predictions.write(tmp_path, found)
    files = {"predictions": found.answers, "nbest_predictions": found.nbest, "null_odds": found.null_odds}
    for name, content in files.items():
        assert json.loads((tmp_path / f"{name}.json").read_text()) == content
    assert extracted(tmp_path, [" ", "first"], []).answers == {"1": "", "2": "first"}
