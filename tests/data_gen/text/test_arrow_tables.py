"""Parquet and Arrow files give what the same documents give as JSON lines, in bounded memory, or one line."""

import importlib.util
import json
import tracemalloc

import pytest
from text_files import make_config, write_text

from bert_packed.core.settings import InputError
from data_gen.text import corpus, sources
from data_gen.text.create_job import create

pa = pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")

DOCUMENTS = ["One fish. Two fish.\nA heading", "", "Rød fish.", "Blue fish.\n\nOld fish. New fish."]
PARAGRAPHS = [text.split("\n") for text in DOCUMENTS]


def write_parquet(path, table, rows=2):
    pq.write_table(table, path, row_group_size=rows, write_batch_size=64)  # rows between ends of pages
    return path


def write_arrow(path, table, rows=2):
    """An Arrow stream, or, by its name, a file with an index."""
    new = pa.ipc.new_file if path.name == "file.arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_dataset(folder, table, rows=2):
    """A folder as `Dataset.save_to_disk` of `datasets` 2 to 5 writes it, two files of data."""
    folder.mkdir()
    names = [f"data-{index:05d}-of-00002.arrow" for index in range(2)]
    half = table.num_rows // 2
    for name, part in zip(names, (table[:half], table[half:]), strict=True):
        write_arrow(folder / name, part, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


WRITERS = {"a.parquet": write_parquet, "stream.arrow": write_arrow, "file.arrow": write_arrow}


def read_json(tmp_path, key, values):
    path = tmp_path / "same.jsonl"
    path.write_text("\n".join(json.dumps({"id": 1, key: value}) for value in values))
    return list(corpus.read_sentences([path])), list(corpus.read_texts([path], 9))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("text", pa.string()),
        ("text", pa.large_string()),
        ("text", pa.string_view()),
        ("text", pa.dictionary(pa.int32(), pa.string())),
        ("paragraphs", pa.list_(pa.string())),
        ("paragraphs", pa.large_list(pa.large_string())),
    ],
    ids=str,
)
def test_rows_are_the_documents_that_lines_of_json_are(tmp_path, name, key, kind):
    values = DOCUMENTS if key == "text" else PARAGRAPHS
    column = pa.array(values).cast(kind) if pa.types.is_dictionary(kind) else pa.array(values, kind)
    path = WRITERS[name](tmp_path / name, pa.table({"id": range(4), key: column}))
    found = list(corpus.read_sentences([path])), list(corpus.read_texts([path], 9))
    assert found == read_json(tmp_path, key, values)
    assert [number for number, _ in found[0]] == [1, 1, 1, 3, 4, 4, 4]
    assert corpus.find_line(path, 3) is None  # a row has no line


def test_a_missing_text_is_the_paragraphs_or_none(tmp_path):
    """It may be missing in a table, and in the lines that `Dataset.to_json` makes of it."""
    rows = [
        {"text": "One.", "paragraphs": ["Not this."]},
        {"text": None, "paragraphs": ["Two.", None]},
        {"text": None, "paragraphs": None},
        {"text": "Four.", "paragraphs": None},
    ]
    path = write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    for each in (path, lines):
        assert list(corpus.read_sentences([each])) == [(1, "One."), (2, "Two."), (4, "Four.")]
        assert list(corpus.read_texts([each], 9)) == [(1, "One."), (2, "Two.\n"), (4, "Four.")]
    for key in rows[0]:
        rows = [{key: None}, {key: "One." if key == "text" else ["One."]}]
        path = write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
        lines.write_text("\n".join(map(json.dumps, rows)))
        assert [list(corpus.read_sentences([each])) for each in (path, lines)] == [[(2, "One.")]] * 2


def test_a_saved_data_set_is_read_by_the_name_of_its_folder(tmp_path):
    """Its files are read, and not the JSON beside them."""
    text, vocab = write_text(tmp_path)
    documents = [{"text": document} for document in text.read_text().split("\n\n")]
    write_dataset(tmp_path / "saved", pa.Table.from_pylist(documents))
    manifest = create(make_config((tmp_path / "saved", vocab), tmp_path / "out"))
    names = [entry["path"].rsplit("/", 2)[1:] for entry in manifest["inputs"]]
    assert names == [["saved", f"data-0000{index}-of-00002.arrow"] for index in range(2)]
    assert [entry["num_documents"] for entry in manifest["inputs"]] == [15, 15]
    (found,) = sources.find_text_sources(f"{tmp_path}/sav*:2")
    assert (found.weight, len(found.paths)) == (2.0, 2)


@pytest.mark.parametrize("name", WRITERS)
def test_neither_row_group_nor_record_batch_is_held(tmp_path, name):
    """16 MB in one row group or record batch: of Arrow's memory and of Python's, a few pieces are in use."""
    line = "Every sentence of this long document is as long as this one is.\n"
    table = pa.table({"text": [f"{index} {line * 64}" for index in range(4000)]})
    path = WRITERS[name](tmp_path / name, table, rows=4000)
    del table
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        num_characters = sum(len(text) for _, text in corpus.read_texts([path], 10**6))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert num_characters > 16_000_000
    assert peak < 3_000_000  # 1 MB as strings, and the pieces that they are made from
    assert pool.max_memory() < 8_000_000


def cut(end):
    return lambda content: content[:end]


def overwrite(content):
    return content[:20] + b"x" * 40 + content[60:]


def is_json(content):
    return b'{"text": "One."}'


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a.parquet", cut(-9), r"must be a complete Parquet file.*Received: Parquet magic"),
        ("a.parquet", overwrite, "must be a complete Parquet file"),
        ("a.parquet", is_json, "must be a complete Parquet file"),
        ("stream.arrow", cut(-8), "must be a complete Arrow stream.*without its end"),
        ("stream.arrow", cut(-20), "must be a complete Arrow file"),
        ("stream.arrow", is_json, "must be a complete Arrow file"),
        ("file.arrow", cut(-8), "must be a complete Arrow file"),
    ],
)
def test_damaged_tables_are_named(tmp_path, name, change, message):
    path = WRITERS[name](tmp_path / name, pa.table({"text": DOCUMENTS}))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=rf"/{name} {message}") as found:
        list(corpus.read_sentences([path]))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["x"], "id": [3]}, r"must have a column `text` .*: body \(string\), id \(int64\)\."),
        ({"text": [3]}, r"Received: text \(int64\)\."),
        ({"paragraphs": ["x"]}, r"Received: paragraphs \(string\)\."),
        ({"text": [" ", None]}, r"must hold at least one sentence"),
        ({"text": pa.array([b"ok", b"\xff"]).view(pa.string())}, r"in UTF-8\. Received: .*Invalid UTF8"),
        # A join of two tables leaves it so
        (pa.table([["x"], ["y"]], ["text", "text"]), r"neither twice\. Received: text \(string\), text \(s"),
    ],
)
def test_errors_name_the_file_and_its_columns(tmp_path, name, columns, message):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    path = WRITERS[name](tmp_path / name, table)
    with pytest.raises(InputError, match=rf"/{name}.*{message}"):
        list(corpus.read_sentences([path]))


def test_without_pyarrow_the_extra_is_named_before_any_work(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", pa.table({"text": DOCUMENTS}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'bert_packed\[arrow\]'. Received: .*/a\.parquet\.$"):
        create(make_config((path, path), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
