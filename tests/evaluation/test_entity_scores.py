"""Entities are counted as conlleval counts them: its rules, written down as they were published."""

from collections import Counter

import numpy as np
import pytest

from bert_packed.tasks.ner.scores import find_entities, is_iob, score

TAGS = ("O", "B-X", "I-X", "B-Y", "I-Y")


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("B-X I-X O B-Y", [("X", 0, 2), ("Y", 3, 4)]),
        ("B-X B-X I-X", [("X", 0, 1), ("X", 1, 3)]),
        ("O I-X I-X", [("X", 1, 3)]),  # begins without B-
        ("B-X I-Y I-Y", [("X", 0, 1), ("Y", 1, 3)]),  # another type begins
        ("I-X B-X", [("X", 0, 1), ("X", 1, 2)]),
        ("O O", []),
        ("B-A-B I-A-B", [("A-B", 0, 2)]),  # a hyphen in the type
    ],
)
def test_entities_by_hand(tags, entities):
    assert find_entities(tags.split()) == entities


def test_scores_by_hand():
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"], ["B-LOC"]]
    predicted = [["B-PER", "I-PER", "O", "B-ORG"], ["O", "O"], ["I-LOC"]]
    # true: PER, LOC, ORG, LOC; predicted: PER, ORG, LOC; right: PER and the last LOC
    assert score(true, predicted) == pytest.approx(
        {
            "accuracy": 4 / 7,
            "precision": 2 / 3,
            "recall": 2 / 4,
            "f1": 4 / 7,
            "f1_LOC": 2 / 3,
            "f1_ORG": 0.0,
            "f1_PER": 1.0,
        }
    )
    # An entity does not go on into the next sentence
    assert score([["B-X"], ["I-X"]], [["B-X"], ["O"]])["f1"] == pytest.approx(2 / 3)
    nothing = {"accuracy": 0, "precision": 0, "recall": 0, "f1": 0, "f1_X": 0}
    assert score([["B-X"]], [["O"]]) == nothing
    assert score([["B-X"]], [["B-Y"]]) == {**nothing, "f1_Y": 0}  # a type that is predicted alone


def test_tags_that_mark_no_entities_have_an_accuracy_alone():
    assert score([["NN", "VB"]], [["NN", "NN"]]) == {"accuracy": 0.5}
    assert score([], []) == score([[]], [[]]) == {"accuracy": 0.0}
    assert not is_iob(["O"]) and not is_iob(["B-X", "S-X"]) and not is_iob(["B-"])
    assert is_iob(iter(["O", "B-X", "I-Y"]))


def end_of_chunk(previous_tag, tag, previous_type, kind):
    """conlleval.pl's endOfChunk, for B, I and O."""
    ends = (previous_tag, tag) in (("B", "B"), ("B", "O"), ("I", "B"), ("I", "O"))
    return ends or (previous_tag != "O" and previous_type != kind)


def start_of_chunk(previous_tag, tag, previous_type, kind):
    """conlleval.pl's startOfChunk, for B, I and O."""
    pairs = (("B", "B"), ("I", "B"), ("O", "B"), ("O", "I"))
    return (previous_tag, tag) in pairs or (tag != "O" and previous_type != kind)


def conlleval(true, predicted):
    """conlleval.pl's loop over lines, an empty one after each sentence: right, found and predicted chunks."""
    counts, in_correct = Counter(), False
    last_true = last_predicted = ("O", "")
    for one, other in zip(true, predicted, strict=True):
        for tag, guess in zip([*one, "O"], [*other, "O"], strict=True):
            now_true, now_predicted = (tuple(each.partition("-")[::2]) for each in (tag, guess))
            ends = [
                end_of_chunk(before[0], now[0], before[1], now[1])
                for before, now in ((last_true, now_true), (last_predicted, now_predicted))
            ]
            starts = [
                start_of_chunk(before[0], now[0], before[1], now[1])
                for before, now in ((last_true, now_true), (last_predicted, now_predicted))
            ]
            if in_correct:
                if all(ends) and last_true[1] == last_predicted[1]:
                    counts["right"] += 1
                    in_correct = False
                elif ends[0] != ends[1] or now_true[1] != now_predicted[1]:
                    in_correct = False
            if all(starts) and now_true[1] == now_predicted[1]:
                in_correct = True
            counts["true"] += starts[0]
            counts["predicted"] += starts[1]
            last_true, last_predicted = now_true, now_predicted
    return counts


def test_random_tags_are_counted_as_by_conlleval():
    rng = np.random.default_rng(0)
    seen = Counter()
    for _ in range(300):
        true = [rng.choice(TAGS, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 5))]
        predicted = [[t if rng.random() < 0.7 else str(rng.choice(TAGS)) for t in tags] for tags in true]
        counts = conlleval(true, predicted)
        if not is_iob(tag for tags in true for tag in tags):
            continue
        found = score(true, predicted)
        precision = counts["right"] / counts["predicted"] if counts["predicted"] else 0.0
        recall = counts["right"] / counts["true"] if counts["true"] else 0.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        assert [found[name] for name in ("precision", "recall", "f1")] == pytest.approx(
            [precision, recall, f1]
        )
        seen.update(counts)
    assert 500 < seen["right"] < seen["true"]
