"""Files of GLUE's nine tasks: texts, alone or in pairs, with a class or a number each."""

import csv
import dataclasses
from pathlib import Path

from bert_packed.core.settings import InputError
from bert_packed.tasks.classify.labels import NUMBER, SINGLE, Examples, Problem
from bert_packed.tasks.rows import TABS, open_lines


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """One task."""

    name: str  # as GLUE spells it, also of its folder
    columns: tuple  # of the text, or both, and of the label: names, or numbers where the file has no header
    classes: tuple[str, ...]  # in the order of GLUE's own data sets and of transformers; () for a number
    metrics: tuple[str, ...]  # keys of `classify.scores.METRICS` that GLUE reports
    # The server's names of parts, and the endings of their dev and test files; () for one of each
    parts: tuple[tuple[str, str], ...] = ()
    # The server's names of further files to predict, where they exist, and their paths from the task's folder
    diagnostics: tuple[tuple[str, str], ...] = ()
    test_columns: tuple[str, ...] = ()  # of the texts in test files, where they are not those of `columns`
    has_torn_lines: bool = False  # in the official train.tsv: left out, as in transformers

    @property
    def problem(self):
        """What is learned."""
        num_texts = len(self.columns) - 1
        return Problem(SINGLE if self.classes else NUMBER, self.classes, num_texts=num_texts)

    @property
    def endings(self):
        """Dict from the server's name of each part to the ending of its files' names."""
        return dict(self.parts or ((self.name, ""),))

    def test_files(self, data_dir):
        """Dict from the server's name to the path of each file to predict, existing diagnostics included."""
        folder = Path(data_dir)
        wanted = {name: folder / f"test{ending}.tsv" for name, ending in self.endings.items()}
        more = {name: folder / file for name, file in self.diagnostics}
        return {**wanted, **{name: path for name, path in more.items() if path.exists()}}


ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    task.name: task
    for task in (
        GlueTask("CoLA", (3, 1), ("0", "1"), ("matthews",), test_columns=("sentence",)),
        GlueTask("SST-2", ("sentence", "label"), ("0", "1"), ("accuracy",)),
        GlueTask("MRPC", ("#1 String", "#2 String", "Quality"), ("0", "1"), ("accuracy", "f1")),
        GlueTask("STS-B", ("sentence1", "sentence2", "score"), (), ("pearson", "spearman")),
        GlueTask(
            "QQP",
            ("question1", "question2", "is_duplicate"),
            ("0", "1"),
            ("accuracy", "f1"),
            has_torn_lines=True,
        ),
        GlueTask(
            "MNLI",
            ("sentence1", "sentence2", "gold_label"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            parts=(("MNLI-m", "_matched"), ("MNLI-mm", "_mismatched")),
            diagnostics=(("AX", "../diagnostic/diagnostic.tsv"),),
        ),
        GlueTask("QNLI", ("question", "sentence", "label"), ENTAILMENT, ("accuracy",)),
        GlueTask("RTE", ("sentence1", "sentence2", "label"), ENTAILMENT, ("accuracy",)),
        GlueTask("WNLI", ("sentence1", "sentence2", "label"), ("0", "1"), ("accuracy",)),
    )
}
TASK_NAMES = tuple(TASKS)
# The files that the server takes have these names, and .tsv
SERVER_NAMES = tuple(name for task in TASKS.values() for name in (*task.endings, *dict(task.diagnostics)))
SCORE_RANGE = (0.0, 5.0)  # of STS-B


def read_glue(path, task):
    """Read one train or dev file of a task: `Examples`; raises `InputError`."""
    (*texts, labels), numbers, num_torn = read_lines(path, task.columns, task.has_torn_lines)
    return Examples(str(path), texts, labels, numbers, "line", num_torn)


def read_glue_test(path, task):
    """Read one of a task's test files, an index first, without labels: `Examples`, and the indices."""
    # Torn lines are errors here: the server wants an answer for each
    (*texts, indices), numbers, _ = read_lines(path, (*(task.test_columns or task.columns[:-1]), 0))
    seen = set()
    for number, index in zip(numbers, indices, strict=True):
        if not (index.isascii() and index.isdecimal()) or index in seen:
            raise InputError(
                f"{path}, line {number}: the first column must be a whole number, each once. "
                f"Received: {index!r:.80}."
            )
        seen.add(index)
    return Examples(str(path), texts, None, numbers, "line"), indices


def read_lines(path, columns, skips_torn=False):
    """Read columns of a tab-separated file, by name from its header, or by number where it has none.

    Returns one list of str per column, the line number of each example, and the number of lines left out.
    """
    found, numbers, num_torn = [[] for _ in columns], [], 0
    has_header = isinstance(columns[0], str)
    with open_lines(path, "tab-separated text") as file:
        lines = enumerate(csv.reader(file, **TABS), 1)
        if has_header:
            columns = _places(path, next(lines, (0, []))[1], columns)
        for number, line in lines:  # not kept as they are: most columns of MNLI are parse trees
            if len(line) > max(columns):
                numbers.append(number)
                for place, column in enumerate(columns):
                    found[place].append(line[column])
            elif skips_torn:
                num_torn += 1
            else:
                raise InputError(
                    f"{path}, line {number}: must have at least {max(columns) + 1} columns. "
                    f"Received: {len(line)}: {' | '.join(line)[:80]!r}."
                )
    if not numbers:
        place = " below its header" if has_header else ""
        raise InputError(
            f"{path} must have a line{place}. Received: {'torn ones only' if num_torn else 'none'}."
        )
    return found, numbers, num_torn


def _places(path, header, columns):
    """Indices of columns, by the header."""
    if not header:
        raise InputError(f"{path} must have a line. Received: an empty file.")
    if missing := [column for column in columns if isinstance(column, str) and column not in header]:
        raise InputError(f"{path} must have a column {missing[0]!r}. Received: {', '.join(header)}.")
    return [header.index(column) if isinstance(column, str) else column for column in columns]
