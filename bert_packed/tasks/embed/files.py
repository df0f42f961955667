"""Files of texts that belong together: pairs, hard negatives, scores, or texts alone."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from bert_packed.core.settings import InputError

SCORE = "score"
LARGEST = 1e30  # a score, in float32
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


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

    Args:
        path: JSON lines, CSV, TSV (without quotes), Parquet, or a folder that `datasets` saved.
        columns: Names of the columns of texts, separated by commas; "" as above.
        score_column: Name of the column of scores; "" for `score` beside sentence1 and sentence2.

    Raises `InputError` with file and row: a column is missing, a text is empty, or a score is no number.
    """
    chosen, texts, scores = None, [], []
    for number, row in _rows_of(path):
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
    if chosen is None:
        raise InputError(f"{path} must have a row. Received: none.")
    if len(chosen) == 1:
        texts = texts * 2
    return Rows(str(path), texts, np.array(scores, np.float32) if score_column else None)


def _choose(path, row, columns, score_column):
    """Names of the columns of texts and of scores; "" for none."""
    names = [*row]
    if columns:
        chosen = [name.strip() for name in columns.split(",")]
    elif "sentence1" in names:
        chosen, score_column = ["sentence1", "sentence2"], score_column or SCORE
    elif "anchor" in names:
        chosen = ["anchor", "positive", *filter(_is_negative, names)]
    else:
        chosen = ["text"]
    wanted = [*chosen, *([score_column] if score_column else [])]
    if missing := [name for name in wanted if name not in names]:
        raise InputError(
            f"{path} must have a column {missing[0]!r}, or --columns must name others. "
            f"Received: {', '.join(map(str, names))}."
        )
    if score_column and len(chosen) != 2:
        raise InputError(f"{path} must have two columns of texts to a score. Received: {len(chosen)}.")
    return chosen, score_column


def _is_negative(name):
    return name.startswith("negative")


def check_text(path, number, name, text):
    """A value of a row as text; raises `InputError` where it is none, or blank."""
    try:
        if isinstance(text, str) and text.strip() and text.encode():
            return text
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can have
        pass
    raise InputError(f"{path}, row {number}: {name} must be a text. Received: {text!r:.80}.")


def _score(path, number, value):
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) < LARGEST or isinstance(value, bool):
        raise InputError(f"{path}, row {number}: the score must be a number. Received: {value!r:.80}.")
    return found


def _rows_of(path):
    """Yield row numbers, from 1, and dicts by column."""
    path = Path(path)
    if path.is_dir():
        yield from _arrow_rows(path, _batches_of_folder)
    elif path.suffix == ".parquet":
        yield from _arrow_rows(path, _batches_of_parquet)
    elif path.suffix in (".csv", ".tsv"):
        yield from _csv_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from json_rows(path)
    else:
        raise InputError(
            f"{path} must end in {', '.join(ENDINGS)}, or be a folder. Received: {path.suffix!r}."
        )


def _csv_rows(path):
    # Quotes are text in TSV, as GLUE has it
    form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=path.suffix == ".csv", **form)
            names = rows.fieldnames or []
            if len({*names}) < len(names):
                raise InputError(f"{path} must name each column once. Received: {', '.join(names)}.")
            for number, row in enumerate(rows, 1):
                if None in row:
                    received = len(names) + len(row[None])
                    raise InputError(
                        f"{path}, row {number}: must have {len(names)} fields. Received: {received}."
                    )
                yield number, row
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be UTF-8. Received: {error}.") from error
    except csv.Error as error:
        raise InputError(f"{path} must be {path.suffix[1:].upper()}. Received: {error}.") from error


def json_rows(path):
    """Yield line numbers, from 1, and the objects of a file of JSON lines; raises `InputError`."""
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise InputError(
                            f"{path}, row {number}: must be a JSON object. Received: {line[:80]!r}."
                        )
                    yield number, row
        except UnicodeDecodeError as error:
            raise InputError(f"{path} must be UTF-8. Received: {error}.") from error
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, row {number}: must be JSON. Received: {error}.") from error


def _arrow_rows(path, batches_of):
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(
            f"{path} needs `pip install -e '.[arrow]'`. Received: no package pyarrow."
        ) from error
    number = 0
    try:
        for batch in batches_of(path):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path} must be whole. Received: {str(error).splitlines()[0]}.") from error


def _batches_of_parquet(path):
    from pyarrow import parquet

    yield from parquet.ParquetFile(path).iter_batches()


def arrow_files(folder):
    """The files of a folder of `datasets.Dataset.save_to_disk`, without what `datasets` caches there."""
    return [path for path in sorted(Path(folder).glob("*.arrow")) if not path.name.startswith("cache-")]


def _batches_of_folder(folder):
    import pyarrow

    files = arrow_files(folder)
    if not files:
        raise InputError(f"{folder} must be a folder that `datasets` saved. Received: no .arrow file in it.")
    for path in files:
        with pyarrow.ipc.open_stream(str(path)) as batches:
            yield from batches
