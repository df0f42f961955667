"""Rows of JSON lines, CSV, TSV, Parquet, and folders that `datasets` saved; and sequences of their texts."""

import contextlib
import csv
import json
from pathlib import Path

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.records.sequences import BERT_LAYOUT, make_sequences

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# Quotes are text: GLUE does not quote, and a reader that assumes so swallows lines
TABS = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}


def rows_of(path):
    """Yield row numbers, from 1, and dicts by column; raises `InputError` where there is no row."""
    path = Path(path)
    if path.is_dir() or path.suffix == ".parquet":
        rows = _arrow_rows(path)
    elif path.suffix in (".csv", ".tsv"):
        rows = _csv_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        rows = json_rows(path)
    else:
        raise InputError(
            f"{path} must end in {', '.join(ENDINGS)}, or be a folder. Received: {path.suffix!r}."
        )
    number = 0
    for number, row in rows:
        yield number, row
    if not number:
        raise InputError(f"{path} must have a row. Received: none.")


def choose_columns(path, row, asked, names, label_flag="", label=""):
    """Names of the columns of texts: `asked`, separated by commas, or `names` where nothing is asked.

    Raises `InputError` where the first row of a file lacks one of them, or the column `label`, which
    `label_flag` names; "" for none.
    """
    chosen = [name.strip() for name in asked.split(",")] if asked else names
    flags = {**dict.fromkeys(chosen, "columns"), **({label: label_flag} if label else {})}
    for name, flag in flags.items():
        if name not in row:
            raise InputError(
                f"{path} must have a column {name!r}, or --{flag} must name another. "
                f"Received: {', '.join(map(str, row))}."
            )
    return chosen


def check_text(path, number, name, text):
    """A value of a row as text; raises `InputError` where it is none, or blank."""
    try:
        if isinstance(text, str) and text.strip() and text.encode():
            return text
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can have
        pass
    raise InputError(f"{path}, row {number}: {name} must be a text. Received: {text!r:.80}.")


@contextlib.contextmanager
def open_lines(path, form=""):
    """Open a text file; raises `InputError` where it is missing, not UTF-8, or not what `form` says."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path} must exist. Received: no such file.") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} must be a file. Received: a folder.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be UTF-8. Received: {error}.") from error
    except csv.Error as error:
        raise InputError(f"{path} must be {form}. Received: {error}.") from error


def _csv_rows(path):
    with open_lines(path, path.suffix[1:].upper()) as file:
        form = TABS if path.suffix == ".tsv" else {"strict": True}
        rows = csv.DictReader(file, **form)
        names = rows.fieldnames or []
        lines_read = rows.line_num
        if len({*names}) < len(names):
            raise InputError(f"{path} must name each column once. Received: {', '.join(names)}.")
        for number, row in enumerate(rows, 1):
            # `csv` skips blank lines; where there is one column, each is an empty value
            if len(names) == 1 and rows.line_num - lines_read > 1 and not row[names[0]].count("\n"):
                raise InputError(f"{path}, row {number}: must not be blank. Received: ''.")
            lines_read = rows.line_num
            if None in row:
                received = len(names) + len(row[None])
                raise InputError(
                    f"{path}, row {number}: must have {len(names)} fields. Received: {received}."
                )
            yield number, row


def json_rows(path):
    """Yield line numbers, from 1, and the objects of a file of JSON lines; raises `InputError`."""
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path}, row {number}: must be JSON, an object a line. Received: {error}."
                ) from error
            if not isinstance(row, dict):
                raise InputError(f"{path}, row {number}: must be a JSON object. Received: {line[:80]!r}.")
            yield number, row


def _arrow_rows(path):
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"{path} needs `pip install -e '.[arrow]'`. Received: no package pyarrow."
        ) from error
    number = 0
    try:
        for batch in _batches_of_folder(path) if path.is_dir() else ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path} must be whole. Received: {str(error).splitlines()[0]}.") from error


def source_files(path):
    """The files that `rows_of` reads: list of str."""
    return list(map(str, arrow_files(path))) if Path(path).is_dir() else [path]


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


def make_text_sequences(texts, tokenizer, max_seq_length, path=""):
    """`[CLS] a [SEP]`, or `[CLS] a [SEP] b [SEP]`, cut to the length as google-research/bert does.

    `texts` is a list of one or two lists of n texts, `tokenizer` a `tokenization.TextTokenizer`. Returns
    `Sequences` of n sequences without predictions, and the number of those that were cut.
    """
    encoded = [tokenizer.encode(column) for column in texts]
    room = max_seq_length - 1 - len(encoded)
    tokens, type_ids, lengths = [], [], []
    num_cut = 0
    for parts in zip(*encoded, strict=True):
        sizes = cut_sizes([len(part) for part in parts], room)
        num_cut += sum(sizes) < sum(map(len, parts))
        tokens.append(tokenizer.cls_id)
        type_ids.append(0)
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            tokens.extend((*part[:size], tokenizer.sep_id))
            type_ids.extend([number] * (size + 1))
        lengths.append(1 + sum(sizes) + len(sizes))
    sequences = make_sequences(
        BERT_LAYOUT,
        str(path),
        tokens=tokens,
        token_type_ids=type_ids,
        lengths=lengths,
        record_numbers=np.arange(1, len(lengths) + 1),
    )
    return sequences, num_cut


def cut_sizes(sizes, room):
    """Number of tokens of each text to keep: [5 9] in 8 -> [4 4], [2 9] in 8 -> [2 6]."""
    sizes = list(sizes)
    # The longer text loses a token at a time, as in google-research/bert; of equal ones the second does
    while sum(sizes) > room:
        longest = len(sizes) - 1 if sizes[-1] >= sizes[0] else 0
        sizes[longest] -= 1
    return sizes
