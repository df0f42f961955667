"""Files of texts that belong together: pairs, hard negatives, scores, or texts alone."""

import dataclasses
import math

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.tasks.rows import check_text, choose_columns, rows_of

SCORE = "score"
LARGEST = 1e30  # a score, in float32


@dataclasses.dataclass(frozen=True)
class Rows:
    """N rows of R texts each."""

    path: str
    texts: list[list[str]]  # R columns of N texts: anchors, positives, hard negatives
    scores: np.ndarray | None = None  # float32 `[N]`, how similar the two texts of a row are

    def __len__(self):
        return len(self.texts[0])


def read_rows(path, columns="", score_column=""):
    """Read a file of rows: `Rows`.

        anchor, positive, negative, ...     a text, one that belongs to it, texts that do not
        sentence1, sentence2, score         two texts, and how similar they are
        text                                each text is its own positive

    `columns` are names of the columns of texts, separated by commas, "" as above; `score_column` is that of
    scores, "" for `score` beside sentence1 and sentence2. Raises `InputError` with file and row.
    """
    chosen, texts, scores = None, [], []
    for number, row in rows_of(path):
        if chosen is None:
            chosen, score_column = _choose(path, row, columns, score_column)
            texts = [[] for _ in chosen]
        for values, name in zip(texts, chosen, strict=True):
            values.append(check_text(path, number, name, row.get(name)))
        if not columns and (more := [name for name in row if _is_negative(name) and name not in chosen]):
            raise InputError(
                f"{path}, row {number}: {more[0]} must be in the first row, too. Received: none."
            )
        if score_column:
            scores.append(_score(path, number, row.get(score_column)))
    if len(chosen) == 1:
        texts = texts * 2
    return Rows(str(path), texts, np.array(scores, np.float32) if score_column else None)


def _choose(path, row, columns, score_column):
    """Names of the columns of texts and of scores; "" for none."""
    if columns:
        names = []
    elif "sentence1" in row:
        names, score_column = ["sentence1", "sentence2"], score_column or SCORE
    elif "anchor" in row:
        names = ["anchor", "positive", *filter(_is_negative, row)]
    else:
        names = ["text"]
    chosen = choose_columns(path, row, columns, names, "score_column", score_column)
    if score_column and len(chosen) != 2:
        raise InputError(f"{path} must have two columns of texts to a score. Received: {len(chosen)}.")
    return chosen, score_column


def _is_negative(name):
    return name.startswith("negative")


def _score(path, number, value):
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) < LARGEST or isinstance(value, bool):
        raise InputError(f"{path}, row {number}: the score must be a number. Received: {value!r:.80}.")
    return found
