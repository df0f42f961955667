"""Scores of GLUE, of entities as conlleval counts them, and of documents, each against a plain formula.

This file alone catches a metric that counts something else than its published definition.
"""

from collections import Counter

import numpy as np
import pytest
from encoder_files import write_beir

from bert_packed.tasks.classify.reranking import read_reranking
from bert_packed.tasks.classify.scores import METRICS
from bert_packed.tasks.glue.task import table_of_tasks
from bert_packed.tasks.ner.scores import is_iob, score

# class 1: two found, three invented, one missed; class 0: four right
PREDICTED, TRUE = [1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]
# One outlier: ranks know nothing of its size; deviations are -3 -2 -1 6 and -1.5 .5 -.5 1.5
NUMBERS, LABELS = [1.0, 2.0, 3.0, 10.0], [1.0, 3.0, 2.0, 4.0]
FAR = [1e8 + 1, 1e8 + 2, 1e8 + 4]


@pytest.mark.parametrize(
    ("name", "predicted", "true", "value"),
    [
        ("accuracy", PREDICTED, TRUE, 6 / 10),
        ("f1", PREDICTED, TRUE, 2 * 2 / (2 * 2 + 3 + 1)),
        ("f1", [0] * 4, [0] * 4, 0),
        ("matthews", PREDICTED, TRUE, (2 * 4 - 3 * 1) / np.sqrt(5 * 3 * 7 * 5)),
        ("pearson", NUMBERS, LABELS, 13 / np.sqrt(50 * 5)),
        ("pearson", [1.0] * 4, LABELS, 0),
        ("pearson", FAR, [1.0, 2.0, 4.0], 1),
        ("pearson", [1.0, 2.0, 4.0], FAR, 1),
        ("spearman", NUMBERS, LABELS, 1 - 6 * 2 / (4 * 15)),
        ("spearman", [5, 5, 7], [1, 2, 3], 1.5 / np.sqrt(1.5 * 2)),  # equal values share the rank 1.5
    ],
)
def test_a_metric_of_glue(name, predicted, true, value):
    assert METRICS[name](np.array(true), np.array(predicted), None) == pytest.approx(value)


def test_the_average_is_as_the_leaderboard_counts_it():
    """BERT-large's line of gluebenchmark.com, whose score is the 80.5 of the paper's abstract."""
    line = {
        "CoLA": {"matthews": 60.5},
        "SST-2": {"accuracy": 94.9},
        "MRPC": {"accuracy": 85.4, "f1": 89.3},
        "STS-B": {"pearson": 87.6, "spearman": 86.5},
        "QQP": {"accuracy": 89.3, "f1": 72.1},
        "MNLI": {"accuracy_matched": 86.7, "accuracy_mismatched": 85.9},
        "QNLI": {"accuracy": 92.7},
        "RTE": {"accuracy": 70.1},
        "WNLI": {"accuracy": 65.1},
    }
    rows, average = table_of_tasks(line)
    assert round(average, 1) == 80.5
    assert [row["task"] for row in rows] == [*line, "average"]
    assert rows[5]["mean"] == pytest.approx(86.3) and rows[-1]["scores"] == "9 of 9 tasks"
    assert table_of_tasks({"CoLA": line["CoLA"]})[1] == 60.5


NOTHING = {"accuracy": 0, "precision": 0, "recall": 0, "f1": 0}


@pytest.mark.parametrize(
    ("true", "predicted", "expected"),
    [
        (  # right are PER and the last LOC
            "B-PER I-PER O B-LOC, O B-ORG, B-LOC",
            "B-PER I-PER O B-ORG, O O, I-LOC",
            {"accuracy": 4 / 7, "precision": 2 / 3, "recall": 2 / 4, "f1": 4 / 7}
            | {"f1_LOC": 2 / 3, "f1_ORG": 0.0, "f1_PER": 1.0},
        ),
        # An entity does not go on into the next sentence
        ("B-X, I-X", "B-X, O", {"accuracy": 0.5, "precision": 1, "recall": 0.5, "f1": 2 / 3, "f1_X": 2 / 3}),
        ("B-X", "O", {**NOTHING, "f1_X": 0}),
        ("B-X", "B-Y", {**NOTHING, "f1_X": 0, "f1_Y": 0}),  # a type that is predicted alone
        # An entity may begin without B-; a type may have a hyphen
        ("B-A-B I-A-B", "I-A-B I-A-B", {**dict.fromkeys(NOTHING, 1), "accuracy": 0.5, "f1_A-B": 1}),
        ("NN VB", "NN NN", {"accuracy": 0.5}),  # tags that mark no entities
        ("", "", {"accuracy": 0.0}),
    ],
)
def test_scores_by_hand(true, predicted, expected):
    sides = ([sentence.split() for sentence in side.split(",")] for side in (true, predicted))
    assert score(*sides) == pytest.approx(expected)


def test_tags_that_mark_entities():
    assert not is_iob(["O"]) and not is_iob(["B-X", "S-X"]) and not is_iob(["B-"])
    assert is_iob(iter(["O", "B-X", "I-Y"]))


def plain_entities(sentences):
    """conlleval.pl's startOfChunk and endOfChunk over lines, an empty one after each sentence: a set."""
    found, place, begun, previous = set(), 0, None, ("O", "")
    for tags in sentences:
        for text in [*tags, "O"]:
            tag, _, kind = text.partition("-")
            pair, is_other = (previous[0], tag), previous[1] != kind
            ends = pair in (("B", "B"), ("B", "O"), ("I", "B"), ("I", "O")) or (
                previous[0] != "O" and is_other
            )
            starts = pair in (("B", "B"), ("I", "B"), ("O", "B"), ("O", "I")) or (tag != "O" and is_other)
            if ends:
                found.add((previous[1], begun, place))
            if starts:
                begun = place
            place, previous = place + 1, (tag, kind)
    return found


def test_random_tags_are_counted_as_by_conlleval():
    rng, seen = np.random.default_rng(0), Counter()
    tags = ("O", "B-X", "I-X", "B-Y", "I-Y")
    for _ in range(300):
        true = [["B-X", *rng.choice(tags, rng.integers(1, 9)).tolist()] for _ in range(rng.integers(1, 5))]
        predicted = [[tag if rng.random() < 0.7 else str(rng.choice(tags)) for tag in one] for one in true]
        want, got = plain_entities(true), plain_entities(predicted)
        num_right = len(want & got)
        precision, recall = num_right / len(got) if got else 0.0, num_right / len(want)
        f1 = 2 * precision * recall / (precision + recall) if num_right else 0.0
        found = score(true, predicted)
        assert [found[name] for name in ("precision", "recall", "f1")] == pytest.approx(
            [precision, recall, f1]
        )
        seen.update(right=num_right, true=len(want))
    assert 500 < seen["right"] < seen["true"]


def test_candidates_are_ranked_and_others_not_found(tmp_path):
    """By hand: the first query finds gains 2 and 1 in the wrong order, the second nothing."""
    qrels = write_beir(tmp_path / "beir") / "qrels" / "test.tsv"
    (tmp_path / "first.tsv").write_text("q\td\ts\n1\tc\t0\n1\ta\t0\n2\ta\t0\n")
    ranked = read_reranking(qrels, str(tmp_path / "first.tsv"))
    assert ranked.examples.texts == [["a", "a", "b"], ["c", "a", "a"]]
    logits = np.array([[3], [1], [2]], np.float32)
    discounted = (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))
    want = {"ndcg@10": 50 * discounted, "mrr@10": 50, "recall@10": 50, "recall@100": 50}
    assert ranked.score(logits) == pytest.approx(want)
    ranked.write(logits, tmp_path)
    lines = (tmp_path / "ranking.tsv").read_text().splitlines()
    assert lines == ["query-id\tcorpus-id\tscore", "1\tc\t3", "1\ta\t1", "2\ta\t2"]
    assert [len(ids) for ids in read_reranking(qrels).candidates.values()] == [3, 3]
