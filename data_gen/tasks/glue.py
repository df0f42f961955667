"""What the files of a GLUE task hold: texts, alone or in pairs, with a class or a number each.

CoLA, SST-2, MRPC, RTE, WNLI and STS-B, in their official tab-separated form; quotes are text.
"""

import csv
import dataclasses
import math

import numpy as np

from data_gen.cli.settings import InputError
from data_gen.records.sequences import make_unlabelled
from data_gen.text.tokenization import encode_sentences


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """One task.

    Attributes:
        name: As GLUE spells it, also its folder.
        columns: Of the text, or of the two texts, then of the label: names, or numbers where the file has no
            header.
        classes: What the label column may say; () where it is a number.
        metrics: Keys of `glue_metrics.METRICS` that GLUE reports.
    """

    name: str
    columns: tuple
    classes: tuple[str, ...]
    metrics: tuple[str, ...]


TASKS = {
    task.name: task
    for task in (
        GlueTask("CoLA", (3, 1), ("0", "1"), ("matthews",)),
        GlueTask("SST-2", ("sentence", "label"), ("0", "1"), ("accuracy",)),
        GlueTask("MRPC", ("#1 String", "#2 String", "Quality"), ("0", "1"), ("accuracy", "f1")),
        GlueTask("RTE", ("sentence1", "sentence2", "label"), ("entailment", "not_entailment"), ("accuracy",)),
        GlueTask("WNLI", ("sentence1", "sentence2", "label"), ("0", "1"), ("accuracy",)),
        GlueTask("STS-B", ("sentence1", "sentence2", "score"), (), ("pearson", "spearman")),
    )
}
TASK_NAMES = tuple(TASKS)


@dataclasses.dataclass(frozen=True)
class LabelledTexts:
    """A file's examples.

    Attributes:
        texts: List of one or two lists of n texts.
        labels: int32 `[n]` classes, or float32 `[n]` numbers.
    """

    texts: list[list[str]]
    labels: np.ndarray


def read_glue(path, task):
    """Read one file of a task.

    Args:
        path: `train.tsv` or `dev.tsv`.
        task: `GlueTask`.

    Returns:
        `LabelledTexts`.

    Raises:
        InputError: the file is missing, empty or no UTF-8, or a line lacks a column or has a label that the
            task does not know (line number).
    """
    *texts, labels = read_columns(path, task.columns)
    first_line = 2 if isinstance(task.columns[0], str) else 1
    found = []
    for number, label in enumerate(labels, first_line):
        try:
            value = task.classes.index(label) if task.classes else float(label)
            if not math.isfinite(value):
                raise ValueError
        except ValueError as error:
            rule = f"one of {', '.join(task.classes)}" if task.classes else "a number"
            raise InputError(
                f"{path}, line {number}: the label of {task.name} must be {rule}. Received: {label!r:.80}."
            ) from error
        found.append(value)
    return LabelledTexts(texts, np.array(found, np.int32 if task.classes else np.float32))


def make_glue_sequences(texts, tokenizer, vocabulary, max_seq_length, path=""):
    """`[CLS] a [SEP]`, or `[CLS] a [SEP] b [SEP]`, cut to the length as google-research/bert does.

    Of a pair that is too long the longer text loses its end, token by token; of equal ones the second.

    Args:
        texts: List of one or two lists of n texts.
        tokenizer, vocabulary: From `tokenization`.
        max_seq_length: Most tokens of a sequence.
        path: File, for messages.

    Returns:
        `Sequences` of n sequences without predictions, and the number of those that were cut.
    """
    encoded = [encode_sentences(tokenizer, column) for column in texts]
    room = max_seq_length - 1 - len(encoded)
    tokens, type_ids, lengths = [], [], []
    num_cut = 0
    for parts in zip(*encoded, strict=True):
        sizes = cut_sizes([len(part) for part in parts], room)
        num_cut += sum(sizes) < sum(map(len, parts))
        tokens.append(vocabulary.cls_id)
        type_ids.append(0)
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            tokens.extend((*part[:size], vocabulary.sep_id))
            type_ids.extend([number] * (size + 1))
        lengths.append(1 + sum(sizes) + len(sizes))
    sequences = make_unlabelled(
        tokens,
        type_ids,
        lengths,
        record_numbers=np.arange(1, len(lengths) + 1),
        path=str(path),
    )
    return sequences, num_cut


def cut_sizes(sizes, room):
    """How many tokens of each text are kept: [5 9] in 8 -> [4 4], [2 9] in 8 -> [2 6]."""
    sizes = list(sizes)
    while sum(sizes) > room:
        longest = len(sizes) - 1 if sizes[-1] >= sizes[0] else 0
        sizes[longest] -= 1
    return sizes


def read_columns(path, columns):
    """Read columns of a tab-separated file, by name from its header or by position where it has none.

    Quotes are text: GLUE does not quote, and a reader that thinks so swallows lines.

    Returns:
        One list of str per column.

    Raises:
        InputError: the file is missing, empty or no UTF-8, or a column is missing.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except FileNotFoundError as error:
        raise InputError(f"{path} must exist. Received: no such file.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be UTF-8. Received: {error}.") from error
    except csv.Error as error:
        raise InputError(f"{path} must be tab-separated text. Received: {error}.") from error
    if not lines:
        raise InputError(f"{path} must have a line. Received: an empty file.")
    first = 1
    if isinstance(columns[0], str):
        header, *lines = lines
        first = 2
        if missing := [column for column in columns if column not in header]:
            raise InputError(f"{path} must have a column {missing[0]!r}. Received: {', '.join(header)}.")
        columns = [header.index(column) for column in columns]
        if not lines:
            raise InputError(f"{path} must have a line below its header. Received: none.")
    for number, line in enumerate(lines, first):
        if len(line) <= max(columns):
            raise InputError(
                f"{path}, line {number}: must have at least {max(columns) + 1} columns. "
                f"Received: {len(line)}: {' | '.join(line)[:80]!r}."
            )
    return [[line[column] for line in lines] for column in columns]
