"""Precision, recall and F1 of entities by their exact spans, as CoNLL's conlleval counts them.

    words   U.N.  official  Ekeus  heads  for  Baghdad
    tags    B-ORG O         B-PER  O      O    B-LOC        -> (ORG 0 1) (PER 2 3) (LOC 5 6)

An entity begins at B-, at I- of another type than the entity before, and at I- after O. It ends before the
next beginning, O, or the end of the sentence.
"""

import itertools
from collections import Counter

OUTSIDE = "O"
PREFIXES = ("B", "I")


def is_iob(tags):
    """True if tags, an iterable of str, mark entities: O, B-TYPE and I-TYPE alone, and not O alone."""
    split = {tag.partition("-")[::2] for tag in tags if tag != OUTSIDE}
    return bool(split) and all(prefix in PREFIXES and kind for prefix, kind in split)


def find_entities(tags):
    """The entities of a sentence: list of `(type, first word, last word + 1)`."""
    found, kind, first = [], None, 0
    # The tag that is added ends an entity at the end of the sentence
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, own = tag.partition("-")
        own = own if prefix in PREFIXES else None
        if kind is not None and (own != kind or prefix == "B"):
            found.append((kind, first, place))
            kind = None
        if kind is None and own is not None:
            kind, first = own, place
    return found


def names_of(tags):
    """Names of the scores that every prediction of tags, lists by sentence, has; the first is the best."""
    return ("f1", "precision", "recall", "accuracy") if is_iob(itertools.chain(*tags)) else ("accuracy",)


def score(true, predicted):
    """Score the tags of sentences, two lists by sentence of lists of str: dict of float.

    `accuracy` is the share of words whose tag is right, O included. Where the true tags mark entities there
    are also `precision`, `recall`, `f1`, and `f1_TYPE` of each true or predicted type. 0 / 0 is 0.
    """
    words = [
        pair for one, other in zip(true, predicted, strict=True) for pair in zip(one, other, strict=True)
    ]
    scores = {"accuracy": sum(one == other for one, other in words) / max(len(words), 1)}
    if not is_iob(tag for tag, _ in words):
        return scores
    right, wanted, given = Counter(), Counter(), Counter()
    for one, other in zip(true, predicted, strict=True):
        # An entity counts once, and only with the same type, first and last word, so these are sets
        entities, claimed = set(find_entities(one)), set(find_entities(other))
        for counter, members in ((right, entities & claimed), (wanted, entities), (given, claimed)):
            counter.update(kind for kind, _, _ in members)
    precision, recall = (right.total() / count.total() if count.total() else 0.0 for count in (given, wanted))
    scores |= {"precision": precision, "recall": recall, "f1": _f1(right, wanted, given, wanted | given)}
    return scores | {
        f"f1_{kind}": _f1(right, wanted, given, [kind]) for kind in sorted(wanted.keys() | given.keys())
    }


def _f1(right, wanted, given, kinds):
    total = sum(wanted[kind] + given[kind] for kind in kinds)
    return 2 * sum(right[kind] for kind in kinds) / total if total else 0.0
