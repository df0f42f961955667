"""SQuAD's official scores, exact match and F1 for v1.1 and v2.0, and the command `squad-eval`."""

import collections
import dataclasses
import re
import string
import sys

from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.core.storage import read_json, write_json
from bert_packed.tasks.config import check_files
from bert_packed.tasks.squad.files import read_squad

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text):
    """Lower-case, without punctuation, articles and superfluous space: "The  cat's!" -> "cats"."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction, truth):
    """1.0 where two answers are equal once normalised, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(truth))


def f1(prediction, truth, empty_matches=False):
    """Harmonic mean of precision and recall over the words of two normalised answers.

        "the red cat", "a cat sat" -> words red cat, cat sat -> 1 in common -> 0.5

    Two answers without a word score 0, and 1 with `empty_matches`, as in v2.0.
    """
    predicted, true = normalize_answer(prediction).split(), normalize_answer(truth).split()
    # Answers without a word have no overlap to measure: two empty ones agree
    if empty_matches and not (predicted and true):
        return float(predicted == true)
    num_same = sum((collections.Counter(predicted) & collections.Counter(true)).values())
    if not num_same:
        return 0.0
    precision, recall = num_same / len(predicted), num_same / len(true)
    return 2 * precision * recall / (precision + recall)


def is_version_2(questions):
    """True if any question is marked as impossible, as in v2.0 alone."""
    return any(question.is_impossible for question in questions)


def has_truths(questions):
    """True if any question has an answer, or none by `is_impossible`."""
    return any(question.answers or question.is_impossible for question in questions)


def score(questions, predictions, na_probs=None, na_prob_thresh=1.0, version_2=None):
    """Score predictions: dict of `exact_match` and `f1` in percent, 0 of no question, and `total` questions.

    v2.0 adds those of questions with (`HasAns_`) and without answer (`NoAns_`), and with `na_probs`
    `best_exact`, `best_f1` and their thresholds.

    Args:
        questions: `Question`s. Those without an answer do not count in v1.1; in v2.0, "" is right for them.
        predictions: Dict from id to answer; questions that are not in it count 0.
        na_probs: Dict from id to the probability of no answer, of v2.0; a missing one is 0.
        na_prob_thresh: Probability above which a question is taken to have none.
        version_2: True to score as v2.0; None for what `is_version_2` finds.
    """
    version_2 = is_version_2(questions) if version_2 is None else version_2
    if not version_2:
        questions = [question for question in questions if question.answers]
    raw = {
        question.id: _score_answer(predictions.get(question.id), question, version_2)
        for question in questions
    }
    if not version_2:
        return _means(raw, list(raw))
    has_answer = {question.id: bool(question.answers) for question in questions}
    answered = {identifier for identifier, answer in predictions.items() if identifier in raw}
    probs = na_probs or {}
    final = {
        # A question taken to have none is right where it has none; without a prediction it stays wrong
        identifier: (2 * (float(not has_answer[identifier]),))
        if probs.get(identifier, 0.0) > na_prob_thresh and identifier in answered
        else pair
        for identifier, pair in raw.items()
    }
    scores = _means(final, list(final))
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        ids = [identifier for identifier in final if has_answer[identifier] == wanted]
        if ids:
            scores |= {prefix + name: value for name, value in _means(final, ids).items()}
    if na_probs is not None:
        for place, name in enumerate(("exact", "f1")):
            own = {identifier: pair[place] for identifier, pair in raw.items()}
            best, threshold = _best_threshold(own, predictions, probs, has_answer)
            scores |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return scores


def _score_answer(answer, question, version_2):
    """Exact match and F1 with the best of the right answers."""
    if answer is None:
        return 0.0, 0.0
    truths = [text for text, _ in question.answers]
    if version_2:
        # An answer of articles and punctuation alone reads as no answer in the official script
        truths = [text for text in truths if normalize_answer(text)] or [""]
    return (
        max(exact_match(answer, truth) for truth in truths),
        max(f1(answer, truth, version_2) for truth in truths),
    )


def _means(pairs, ids):
    exact, f1s = (100.0 * sum(pairs[identifier][place] for identifier in ids) for place in (0, 1))
    count = max(len(ids), 1)
    return {"exact_match": exact / count, "f1": f1s / count, "total": len(ids)}


def _best_threshold(scores, predictions, na_probs, has_answer):
    """The best score that any threshold gives, in percent, and the threshold, as the official script does."""
    # It starts where no question is taken to have an answer; answers come in by ascending probability
    current = best = sum(1.0 for has in has_answer.values() if not has)
    threshold = 0.0
    for identifier in sorted((i for i in scores if i in predictions), key=lambda i: na_probs.get(i, 0.0)):
        if has_answer[identifier]:
            current += scores[identifier]
        elif predictions[identifier]:
            current -= 1.0
        if current > best:
            best, threshold = current, na_probs.get(identifier, 0.0)
    return 100.0 * best / max(len(scores), 1), threshold


def warnings_about(questions, predictions, version_2=None):
    """Lines that warn about odd questions and predictions; `version_2` as in `score`."""
    version_2 = is_version_2(questions) if version_2 is None else version_2
    unanswered = [] if version_2 else [question.id for question in questions if not question.answers]
    ids = {question.id for question in questions}
    missing = [question.id for question in questions if question.id not in predictions]
    unknown = [identifier for identifier in predictions if identifier not in ids]
    lines = []
    if unanswered:
        lines.append(
            f"{len(unanswered)} of {len(ids)} questions have no answer, without is_impossible, and do not "
            f"count, as {unanswered[0]}"
        )
    if missing:
        lines.append(f"{len(missing)} of {len(ids)} questions without prediction count 0, as {missing[0]}")
    if unknown:
        lines.append(f"{len(unknown)} predictions of unknown questions do not count, as {unknown[0]}")
    return lines


def read_predictions(path, kind=str):
    """A JSON object from question id to an answer, or to a number where `kind` is not str."""
    content = read_json(path)
    kinds = (kind,) if kind is str else (int, float)
    for identifier, value in content.items():
        if not isinstance(value, kinds) or isinstance(value, bool):
            what = "text" if kind is str else "a number"
            raise InputError(f"{path}, {identifier}: must be {what}. Received: {value!r:.80}.")
    return content


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Scores predicted answers to SQuAD questions: exact match and F1 in percent.

    v2.0 data also gives the scores of questions with and without an answer. With --na_prob_file it
    gives those at the best thresholds, too. Questions without a prediction count 0; predictions of
    unknown ids do not count. Standard error names both.
    """

    data_file: str = setting("", "SQuAD JSON with the right answers", required=True)
    prediction_file: str = setting(
        "", "JSON object from question id to answer; an empty answer is none", required=True
    )
    na_prob_file: str = setting("", "v2.0: JSON object from question id to how likely it has no answer")
    na_prob_thresh: float = setting(1.0, "v2.0: above it a question is taken to have no answer", minimum=None)
    json: str = setting("", "also write the scores, in full precision, to this file")

    def __post_init__(self):
        check_settings(self)
        check_files(self, ["data_file", "prediction_file", "na_prob_file"])


def evaluate(config):
    """Read, score, print."""
    questions = read_squad(config.data_file, for_training=False).questions
    predictions = read_predictions(config.prediction_file)
    version_2 = is_version_2(questions)
    # Files to predict on may come without answers, which leaves nothing to score
    if not has_truths(questions):
        raise InputError(
            f"`data_file` must hold answers, or is_impossible. Received: {config.data_file}, without any."
        )
    na_probs = None
    if config.na_prob_file:
        if not version_2:
            raise InputError(
                f"`na_prob_file` must be left out for v1.1 data. Received: {config.na_prob_file}."
            )
        na_probs = read_predictions(config.na_prob_file, float)
    for line in warnings_about(questions, predictions):
        # Warnings go to stderr, which leaves the table alone on stdout
        print(f"squad-eval: warning: {line}", file=sys.stderr)
    scores = score(questions, predictions, na_probs, config.na_prob_thresh, version_2)
    print_table([{"score": name, "value": value} for name, value in scores.items()])
    if config.json:
        write_json(config.json, scores)
