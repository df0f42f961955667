"""Documents from rows of Parquet and Arrow files, read a few at a time; needs the extra `arrow`.

A row, like a line of JSON, is a document: its `text`, or its `paragraphs`. Arrow files are streams, as in
Hugging Face's `datasets` (`save_to_disk`, and its cache), or have an index at the end. Files are mapped, and
pages are released after reading: memory holds one page of a row group, or some rows of a batch (all where it
is compressed). Parquet of the hub is read over the network, the text column's pages alone.
"""

import pyarrow as pa
import pyarrow.parquet as pq

from bert_packed.core import hub, progress, storage
from bert_packed.core.settings import InputError
from data_gen.text.token_corpus import map_bytes, release

ROWS_AT_ONCE = 1024
BYTES_AT_ONCE = 2**20  # text, unless one row has more
FILE_MAGIC = b"ARROW1"  # first bytes of an Arrow file with an index
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_rows(path, column="text"):
    """Yield row numbers, from 1, and documents: `text`, else `paragraphs` (list of str), else "".

    Another `column` takes the place of the two.
    """
    is_streamed = is_parquet(path) and hub.is_on_hub(path)
    content = None if is_streamed else map_bytes(path)
    number = 0
    try:
        for batch in (_read_parquet if is_parquet(path) else _read_arrow)(path, content, column):
            batch.validate(full=True)  # a damaged file may hold offsets outside its memory
            for document in _documents(batch):
                number += 1
                yield number, document
            release([] if is_streamed else [content])
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the operating system is not about the content
        kind = "Parquet" if is_parquet(path) else "Arrow"
        reason = " ".join(str(error).split()).rstrip(".")
        raise InputError(f"{path} must be a complete {kind} file, in UTF-8. Received: {reason}.") from error


def is_parquet(path):
    return str(path).lower().endswith(".parquet")


def _read_parquet(path, content, column):
    size = storage.size_and_time(path)[0] if content is None else len(content)
    with (
        storage.open_file(path) if content is None else pa.BufferReader(content) as source,
        pq.ParquetFile(source, pre_buffer=False, buffer_size=BYTES_AT_ONCE if content is None else 0) as file,
    ):
        names = _text_columns(path, file.schema_arrow, column)
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            columns = [group.column(column) for column in range(group.num_columns)]
            wanted = [column for column in columns if column.path_in_schema.split(".")[0] in names]
            num_bytes = sum(column.total_uncompressed_size for column in wanted)
            rows = _rows_at_once(group.num_rows, num_bytes)
            for batch in file.iter_batches(rows, [index], columns=names, use_threads=False):
                yield batch
                progress.advance(size * batch.num_rows // file.metadata.num_rows)


def _read_arrow(path, content, column):
    source = pa.BufferReader(content)
    place = 0
    for names, batch in _record_batches(path, content, source, column):
        batch = batch.select(names)
        rows = _rows_at_once(batch.num_rows, batch.nbytes)
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)
        before, place = place, source.tell()
        progress.advance(max(place - before, 0))


def _record_batches(path, content, source, column):
    if content[: len(FILE_MAGIC)].tobytes() == FILE_MAGIC:
        with pa.ipc.open_file(source) as reader:
            names = _text_columns(path, reader.schema, column)
            for index in range(reader.num_record_batches):
                yield names, reader.get_batch(index)
        return
    with pa.ipc.open_stream(source) as reader:
        names = _text_columns(path, reader.schema, column)
        for batch in reader:
            yield names, batch
    # a stream truncated between two record batches reads without an error
    if content[-len(END_OF_STREAM) :].tobytes() != END_OF_STREAM:
        raise InputError(f"{path} must be a complete Arrow stream. Received: one without its end.")


def _rows_at_once(num_rows, num_bytes):
    """Number of rows in `BYTES_AT_ONCE`, by their mean size."""
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * num_rows // max(num_bytes, 1)))


def _documents(batch):
    # `text` comes first where there are both
    columns = [batch.column(name).to_pylist() for name in sorted(batch.schema.names, reverse=True)]
    for values in zip(*columns, strict=True):
        found = next((value for value in values if value is not None), "")
        yield found if isinstance(found, str) else [paragraph or "" for paragraph in found]


def _text_columns(path, schema, column):
    """The names, of `text` and `paragraphs` or a `column`, of text columns; raises `InputError` for none."""
    rules = {"text": _is_text, "paragraphs": _is_list_of_text}
    wanted = "`text` (strings) or `paragraphs` (lists of strings), neither twice"
    if column != "text":
        rules = {column: lambda kind: _is_text(kind) or _is_list_of_text(kind)}
        wanted = f"`{column}`, by text_column, of strings or lists of them, once"
    names = [field.name for field in schema if field.name in rules and rules[field.name](field.type)]
    if not names or any(schema.names.count(name) > 1 for name in names):
        found = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no column"
        raise InputError(f"{path}: a table must have a column {wanted}. Received: {found}.")
    return names


def _is_text(kind):
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list_of_text(kind):
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(kind.value_type)
