"""Exact match and F1 on hand-made cases of v1.1 and v2.0, and the command around them."""

import json

import pytest
from recorded_calls import assert_refused, run
from squad_files import CONTEXT, QUESTIONS, entry, write

from bert_packed.tasks.squad import scores as squad_scores
from bert_packed.tasks.squad.files import Question
from bert_packed.tasks.squad.scores import EvalConfig, evaluate, exact_match, f1, normalize_answer, score


def question(identifier, *answers):
    return Question(identifier, "?", 0, tuple((text, 0) for text in answers), not answers)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat's, hat!", "cats hat"),
        ("an apple a day", "apple day"),
        ("theatre Atlantic", "theatre atlantic"),
        ("A", ""),
        ("\u00c9t\u00e9\u2014 50%", "\u00e9t\u00e9\u2014 50"),
        ("the-end", "theend"),
    ],
)
def test_normal_form(text, normal):
    assert normalize_answer(text) == normal


def test_one_answer_against_another():
    assert exact_match("The cat", "cat!") == 1.0
    assert exact_match("cats", "cat") == 0.0
    assert f1("the red cat", "a cat sat") == 0.5
    assert f1("b b c", "b c c") == pytest.approx(2 / 3)
    assert f1("dog", "cat") == 0.0
    assert (f1("the", "a"), f1("the", "a", empty_matches=True)) == (0.0, 1.0)
    assert f1("", "cat", empty_matches=True) == 0.0


# Rows have the right answers, "" for none, the prediction, None for none, and the probability of no answer
PAIRS = [("cat", "cat", 0.1), ("", "dog", 0.7), ("owl", "owl", 0.2), ("", "", 0.9)]
SCORES = [
    (
        [("red cat|cat", "the cat"), ("dog", None), ("old grey owl", "grey owl")],
        {"exact_match": 100 / 3, "f1": 100 * (1 + 0.8) / 3, "total": 3},
    ),
    (
        [("red cat", "cat"), ("", ""), ("", "dog"), ("owl", "")],
        {"exact_match": 25, "f1": 100 * (2 / 3 + 1) / 4, "total": 4}
        | {"HasAns_exact_match": 0, "HasAns_f1": 100 / 3, "HasAns_total": 2}
        | {"NoAns_exact_match": 50, "NoAns_f1": 50, "NoAns_total": 2},
    ),
    # With nothing answered, 2 are right; up to 0.1, 3; up to 0.2, 4; up to 0.7, "dog" is wrong
    (PAIRS, {"exact_match": 75, "best_exact": 100, "best_exact_thresh": 0.2, "best_f1": 100}),
    # Sorted by probability they are rightly none, right, an answer where there is none, and right again
    (
        [("one", "one", 0.1), ("", "one", 0.2), ("two", "two", 0.3), ("", "", 0.05)],
        {f"best_{name}": 75 for name in ("exact", "f1")} | {"best_exact_thresh": 0.1, "best_f1_thresh": 0.1},
    ),
]


def score_rows(rows, **options):
    """Scores of rows, whose ids are their numbers; and of a prediction that has no question."""
    numbered = [(str(number), *row) for number, row in enumerate(rows)]
    questions = [question(name, *filter(None, truths.split("|"))) for name, truths, *_ in numbered]
    predictions = {name: answer for name, _, answer, *_ in numbered if answer is not None}
    probs = {name: row[0] for name, _, _, *row in numbered if row} or None
    return score(questions, {**predictions, "unknown": "who?"}, probs, **options)


@pytest.mark.parametrize(("rows", "expected"), SCORES)
def test_scores(rows, expected):
    scores = score_rows(rows)
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    # Those with probabilities have more scores, of the best thresholds
    assert len(rows[0]) == 3 or scores.keys() == expected.keys()


@pytest.mark.parametrize(("threshold", "right"), [(0.2, 100), (0.5, 100), (0.05, 50)])
def test_at_the_threshold_an_answer_counts(threshold, right):
    assert score_rows(PAIRS, na_prob_thresh=threshold)["exact_match"] == right
    # A question without a prediction is wrong whatever its probability
    missing = [PAIRS[0], ("", None, 0.7), *PAIRS[2:]]
    assert score_rows(missing, na_prob_thresh=0.5)["exact_match"] == 75


def test_v2_has_answer_by_the_list_of_answers():
    """The official script does so even if an answer is but an article, or is_impossible says otherwise."""
    article = question("1", "The")
    listed = Question("2", "?", 0, (("cat", 0),), True)
    scores = score([article, listed, question("3")], {"1": "", "2": "cat", "3": "dog"}, {"1": 5.0})
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (2, 1)
    # Questions above the threshold are taken to have no answer, which the list contradicts
    assert (scores["HasAns_exact_match"], scores["NoAns_exact_match"]) == (50.0, 0.0)


def test_v1_questions_without_answer_are_told_and_do_not_count():
    questions = [question("1", "cat"), Question("2", "?", 0, (), False)]
    assert score(questions, {"1": "cat", "2": "dog"}) == {"exact_match": 100.0, "f1": 100.0, "total": 1}
    told = "1 of 2 questions have no answer, without is_impossible, and do not count, as 2"
    assert squad_scores.warnings_about(questions, {"1": "cat", "2": "dog"}) == [told]
    assert squad_scores.warnings_about(questions, {"1": "cat", "2": "dog"}, version_2=True) == []
    told = "1 of 2 questions without prediction count 0, as 1"
    assert squad_scores.warnings_about(questions, {"2": "dog"}, version_2=True) == [told]


def test_impossible_questions_alone_can_be_scored():
    assert squad_scores.has_truths([question("1")])
    assert score([question("1")], {"1": ""})["NoAns_f1"] == 100.0


def test_a_mistake_is_one_line(tmp_path):
    data = write(tmp_path / "data.json", *QUESTIONS)
    predictions, unanswered = tmp_path / "predictions.json", tmp_path / "unanswered.json"
    write(unanswered, (CONTEXT, [entry("1", "?")]))
    for text, changes, message in (
        ("{", {}, "must be JSON. Received: Expecting property name enclosed in double quotes: line 1"),
        ("[]", {}, "must hold a JSON object. Received: list."),
        ('{"q1": 3}', {}, "q1: must be text. Received: 3."),
        ("{}", {"na_prob_file": predictions}, "`na_prob_file` must be left out for v1.1 data"),
        ("{}", {"data_file": tmp_path / "none.json"}, "`data_file` must be an existing file. Received: "),
        ("{}", {"data_file": unanswered}, "`data_file` must hold answers, or is_impossible"),
        ("{}", {"prediction_file": ""}, "`prediction_file` must be given"),
    ):
        predictions.write_text(text)
        flags = {"data_file": data, "prediction_file": predictions, **changes}
        assert_refused(evaluate, EvalConfig, message, **flags)


def test_the_command(tmp_path):
    pair = [entry("1", "?", "b", "a b c"), entry("2", "?", is_impossible=True)]
    data = write(tmp_path / "data.json", ("a b c", pair), version="v2.0")
    predictions, probs, out = tmp_path / "p.json", tmp_path / "n.json", tmp_path / "o.json"
    predictions.write_text('{"1": "b", "2": "c", "alien": "x"}')
    probs.write_text('{"1": -3.5, "2": 4}')
    flags = {"data_file": data, "prediction_file": predictions, "na_prob_file": probs, "json": out}
    seen = run(evaluate, EvalConfig, **flags)
    assert seen.status == 0
    assert "1 predictions of unknown questions do not count, as alien" in seen.error
    scores = json.loads(out.read_text())
    assert (scores["exact_match"], scores["HasAns_f1"], scores["NoAns_f1"]) == (100.0, 100.0, 100.0)
    assert (scores["best_f1"], scores["best_f1_thresh"]) == (100.0, -3.5)
