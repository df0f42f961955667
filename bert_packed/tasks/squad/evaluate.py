"""Scores of answers to SQuAD questions, from files, as the official script computes them."""

import dataclasses
import sys

from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.core.storage import write_json
from bert_packed.tasks.config import check_files
from bert_packed.tasks.squad import scores as squad_scores
from bert_packed.tasks.squad.files import read_squad


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
    na_prob_thresh: float = setting(1.0, "v2.0: above it a question is taken to have no answer")
    json: str = setting("", "also write the scores, in full precision, to this file")

    def __post_init__(self):
        check_settings(self)
        check_files(self, ["data_file", "prediction_file", "na_prob_file"])


def evaluate(config):
    """Read, score, print."""
    questions = read_squad(config.data_file, for_training=False).questions
    predictions = squad_scores.read_predictions(config.prediction_file)
    version_2 = squad_scores.is_version_2(questions)
    # Files to predict on may come without answers: nothing to score
    if not squad_scores.has_truths(questions):
        raise InputError(
            f"`data_file` must hold answers, or is_impossible. Received: {config.data_file}, without any."
        )
    na_probs = None
    if config.na_prob_file:
        if not version_2:
            raise InputError(
                f"`na_prob_file` must be left out for v1.1 data. Received: {config.na_prob_file}."
            )
        na_probs = squad_scores.read_predictions(config.na_prob_file, float)
    for line in squad_scores.warnings_about(questions, predictions):
        # Warnings go to stderr, which leaves the table alone on stdout
        print(f"squad-eval: warning: {line}", file=sys.stderr)
    scores = squad_scores.score(questions, predictions, na_probs, config.na_prob_thresh, version_2)
    print_table([{"score": name, "value": value} for name, value in scores.items()])
    if config.json:
        write_json(config.json, scores)
