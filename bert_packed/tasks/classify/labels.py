"""Labels of examples: read from the rows of a file, recognised, and numbered.

Legend: n examples, C labels.
"""

import dataclasses
import math
import re

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.tasks.rows import check_text, choose_columns, rows_of

# The names are those of transformers
SINGLE, SEVERAL, NUMBER = PROBLEMS = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
BALANCED = "balanced"
LARGEST = 1e18  # number to learn, whose square is finite in float32
WHOLE = re.compile(r"\+?(-?[0-9]+)(\.0*)?")


@dataclasses.dataclass(frozen=True)
class Examples:
    """The n examples of a file."""

    path: str
    texts: list[list[str]]  # one or two columns of n texts
    labels: list | None  # of each example: a str, or a tuple of several; None where they were not read
    rows: list[int]  # of the examples in the file, for messages
    unit: str = "row"  # what `rows` counts
    num_torn: int = 0  # lines that were left out, because they lack columns

    def __len__(self):
        return len(self.texts[0])

    def place(self, number):
        """Path and row of an example, for messages."""
        return f"{self.path}, {self.unit} {self.rows[number]}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is learned."""

    kind: str  # one of `PROBLEMS`
    names: tuple[str, ...] = ()  # of the C labels by number; () for a number
    is_chance: bool = False  # a number from 0 to 1, predicted by the sigmoid of the model's output
    num_texts: int | None = None  # 1 for single texts, 2 for pairs, None where it is not known

    def numbers(self, examples):
        """The labels of `Examples`: int32 `[n]` classes, or float32 `[n, C]` of 0 and 1, or `[n]` numbers.

        `InputError` names the row of a label that is none of `names`, or no number.
        """
        if self.kind == NUMBER:
            least, most = (0, 1) if self.is_chance else (-LARGEST, LARGEST)
            each = range(len(examples))
            return np.array([_number(examples, place, least, most) for place in each], np.float32)
        numbers = {name: number for number, name in enumerate(self.names)}
        found = []
        for place, label in enumerate(examples.labels):
            each = label if isinstance(label, tuple) else (label,)
            if self.kind == SINGLE and len(each) != 1:
                raise InputError(f"{examples.place(place)}: must have one label. Received: {len(each)}.")
            if unknown := [name for name in each if name not in numbers]:
                raise InputError(
                    f"{examples.place(place)}: the label must be one of {', '.join(self.names):.200}. "
                    f"Received: {unknown[0]!r:.80}."
                )
            found.append([numbers[name] for name in each])
        if self.kind == SINGLE:
            return np.array(found, np.int32)[:, 0]
        bits = np.zeros((len(found), len(numbers)), np.float32)
        for row, own in enumerate(found):
            bits[row, own] = 1
        return bits

    def shown(self, decision):
        """One decision, in the form of `numbers`, as people read it: a str, a tuple of str, or a float."""
        if self.kind == SEVERAL:
            return tuple(name for name, bit in zip(self.names, decision, strict=True) if bit)
        return self.names[decision] if self.kind == SINGLE else decision


def read_examples(path, columns="", label_column="label", separator="", has_labels=True):
    """Read the texts of a file, and their labels: `Examples`; raises `InputError` with file and row.

    Args:
        columns: Names of one or two columns of texts, separated by a comma; "" for `text`, else `sentence1`
            and `sentence2`.
        separator: Text between several labels of an example; "" for one. A JSON list is several anyway.
        has_labels: False to leave the labels unread.
    """
    chosen, texts, labels, rows = None, [], [], []
    for number, row in rows_of(path):
        if chosen is None:
            names = ["sentence1", "sentence2"] if "sentence1" in row and "text" not in row else ["text"]
            label = label_column if has_labels else ""
            chosen = choose_columns(path, row, columns, names, "label_column", label)
            if len(chosen) > 2:
                raise InputError(f"`columns` must name one or two columns. Received: {columns}.")
            texts = [[] for _ in chosen]
        for values, name in zip(texts, chosen, strict=True):
            values.append(check_text(path, number, name, row.get(name)))
        rows.append(number)
        if has_labels:
            labels.append(_label(path, number, row.get(label_column), separator))
    return Examples(str(path), texts, labels if has_labels else None, rows)


def _label(path, number, value, separator):
    """A label as text, or a tuple of several."""
    if separator and isinstance(value, str):
        value = [part.strip() for part in value.split(separator)] if value.strip() else []
    if isinstance(value, list):
        return tuple(_one_label(path, number, part) for part in value)
    return _one_label(path, number, value)


def _one_label(path, number, value):
    # JSON has numbers and truth values, which are labels as CSV writes them
    text = str(value).lower() if isinstance(value, bool) else value
    text = str(text) if isinstance(text, int | float) else text
    if not isinstance(text, str) or not text.strip() or value != value:  # NaN is no label
        raise InputError(f"{path}, row {number}: the label must not be empty. Received: {value!r:.80}.")
    text = check_text(path, number, "the label", text).strip()
    if "\t" in text or len(text.splitlines()) > 1:
        raise InputError(
            f"{path}, row {number}: the label must have neither tabs nor line ends. Received: {text!r:.80}."
        )
    # A column that once had gaps has 1.0 for 1
    whole = WHOLE.fullmatch(text)
    return whole[1] if whole else text


def find_problem(examples, asked="auto"):
    """The `Problem` of training examples; `asked` is a kind of `PROBLEMS`, or "auto" for that of the labels.

        spam, ham        one class        [a, b], [c]      several labels
        0, 1.0, +2       one class        0.5, 1           a number

    Classes are sorted, whole numbers by value. Raises `InputError` for a number among words, labels of two
    kinds, or fewer than two classes; `Problem.numbers` checks each label.
    """
    kind = _kind(examples) if asked == "auto" else asked
    if kind == NUMBER:
        return Problem(kind)
    each = [label if isinstance(label, tuple) else (label,) for label in examples.labels]
    for place, own in enumerate(each):
        if kind == SINGLE and len(own) != 1:
            raise InputError(f"{examples.place(place)}: must have one label. Received: {len(own)}.")
    names = {name for own in each for name in own}
    least = 2 if kind == SINGLE else 1
    if len(names) < least:
        received = ", ".join(names) or "none"
        raise InputError(f"{examples.path} must have {least} or more different labels. Received: {received}.")
    is_whole = all(WHOLE.fullmatch(name) for name in names)
    return Problem(kind, tuple(sorted(names, key=(lambda name: (int(name), name)) if is_whole else None)))


def _kind(examples):
    are_several = [isinstance(label, tuple) for label in examples.labels]
    if any(are_several):
        if not all(are_several):
            place = are_several.index(sum(are_several) * 2 <= len(are_several))
            label = examples.labels[place]
            rule = "one label" if are_several[place] else "a list of labels"
            raise InputError(
                f"{examples.place(place)}: must have {rule}, as most rows. Received: {label!r:.80}."
            )
        return SEVERAL
    are_numbers = [_is_number(label) for label in examples.labels]
    if not any(are_numbers):
        return SINGLE
    if not all(are_numbers):
        # It may be a slip or a shifted column, so it must be said
        rare = sum(are_numbers) * 2 <= len(are_numbers)
        place = are_numbers.index(rare)
        rule = "a word" if rare else "a number"
        raise InputError(
            f"{examples.place(place)}: the label must be {rule}, as in most rows, unless "
            f"--problem_type={SINGLE}. Received: {examples.labels[place]!r:.80}."
        )
    return SINGLE if all(WHOLE.fullmatch(label) for label in examples.labels) else NUMBER


def _is_number(text):
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(examples, place, least, most):
    label = examples.labels[place]
    if isinstance(label, str) and _is_number(label) and least <= float(label) <= most:
        return float(label)
    rule = "a number" if most == LARGEST else f"a number from {least} to {most}"
    raise InputError(f"{examples.place(place)}: the label must be {rule}. Received: {label!r:.80}.")


def parse_weights(text):
    """`--class_weights`: empty, balanced, or labels with their weights, separated by commas."""
    if text and text != BALANCED:
        for part in text.split(","):
            _, _, weight = part.rpartition("=")
            if not (_is_number(weight) and "=" in part and 0 < float(weight) < LARGEST):
                raise ValueError("empty, balanced, or labels with weights above 0, as spam=3,news=0.5")
    return text


def weights_of(text, problem, labels):
    """Weights of the C classes, float32 `[C]`, for `--class_weights` and the training labels `[n]`.

    None for no weights. Raises `InputError` for a name that is no class.
    """
    if not text:
        return None
    if problem.kind != SINGLE:
        raise InputError(f"`class_weights` must be left out for {problem.kind}. Received: {text}.")
    if text == BALANCED:
        counts = np.bincount(labels, minlength=len(problem.names))
        return (len(labels) / (len(counts) * counts)).astype(np.float32)
    parts = [part.rpartition("=")[::2] for part in text.split(",")]
    weights = {name.strip(): float(weight) for name, weight in parts}
    if len(weights) < len(parts):
        raise InputError(f"`class_weights` must name each class once. Received: {text}.")
    if unknown := [name for name in weights if name not in problem.names]:
        raise InputError(
            f"`class_weights` must name classes, {', '.join(problem.names):.200}. Received: {unknown[0]}."
        )
    return np.array([weights.get(name, 1) for name in problem.names], np.float32)
