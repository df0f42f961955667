"""Readers return every sentence in its document, and name file and line of what they cannot read."""

import gzip
import json
import random
import tracemalloc

import pytest

from bert_packed.core.settings import InputError
from data_gen.text import corpus

DOCUMENTS = [["One fish.", "Two fish."], ["Red fish."], ["Blue fish.", "Old fish.", "New fish."]]


def read_documents(paths):
    """Lists of sentences, one a document."""
    documents, last = [], None
    for path in paths:
        for number, sentence in corpus.read_sentences([path]):
            if (path, number) != last:
                documents.append([])
                last = path, number
            documents[-1].append(sentence)
    return documents


def write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_sentence_lines(tmp_path, name):
    text = "\n\n" + "\n\n \n".join("\n".join(document) for document in DOCUMENTS)
    assert read_documents([write(tmp_path / name, text)]) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.ndjson"])
@pytest.mark.parametrize("key", ["text", "paragraphs"])
def test_json_lines(tmp_path, name, key):
    values = [" ".join(document) if key == "text" else document for document in DOCUMENTS]
    lines = [json.dumps({"title": "x", key: value}) for value in values]
    assert read_documents([write(tmp_path / name, "\n\n".join(lines))]) == DOCUMENTS


def test_lines_of_a_json_text_are_paragraphs(tmp_path):
    path = write(tmp_path / "a.json", json.dumps({"text": "A heading\nOne fish. Two fish.\n\n"}))
    assert read_documents([path]) == [["A heading", "One fish.", "Two fish."]]


def test_half_a_character_is_replaced(tmp_path):
    path = write(tmp_path / "a.json", '{"text": "One \\ud800fish."}')
    assert read_documents([path]) == [["One \ufffdfish."]]


def test_a_document_ends_with_its_file(tmp_path):
    paths = [write(tmp_path / f"{i}.txt", "\n".join(document)) for i, document in enumerate(DOCUMENTS)]
    assert read_documents(paths) == DOCUMENTS


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 4096])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.json"])
def test_lines_end_with_lf_cr_lf_or_cr(tmp_path, monkeypatch, end, size, name):
    monkeypatch.setattr(corpus, "READ_BYTES", size)  # line ends on the borders of what is read at once
    lines = ["One\u2028fish.", "Two\x0bfish.", "", "Red fish.", "", "", "Blue."]
    expected = [lines[:2], [lines[3]], [lines[6]]]
    if name == "a.json":
        lines = [json.dumps({"paragraphs": document}) for document in DOCUMENTS]
        expected = DOCUMENTS
    path = tmp_path / name
    data = end.join(lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_documents([path]) == expected
    assert [number for number, _ in corpus.read_lines(path)] == list(range(1, len(lines) + 1))
    path.write_bytes(gzip.compress(data + end.encode()) if name.endswith(".gz") else data + end.encode())
    assert read_documents([path]) == expected


def test_documents_keep_their_numbers_and_files_their_own(tmp_path):
    first = write(tmp_path / "a.json", '{"text": "One."}\n{"text": ""}\n\n{"text": "Two. Three."}')
    second = write(tmp_path / "b.txt", "\n\nOne.\n\n\nTwo.")
    found = list(corpus.TextDocuments((str(first), str(second)), False))
    assert found == [(1, "One."), (3, "Two."), (3, "Three."), (1, "One."), (2, "Two.")]
    assert [corpus.find_line(first, number) for number in (1, 2, 3, 4)] == [1, 2, 4, None]
    assert [corpus.find_line(second, number) for number in (1, 2, 3)] == [3, 6, None]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_document_of_any_length_is_not_held(tmp_path, name):
    line = "Every sentence of this long document is as long as this one is.\n"
    path = write(tmp_path / name, line * 30_000)  # 1.9 MB
    tracemalloc.start()
    try:
        num_sentences = sum(1 for _ in corpus.read_sentences([path]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_sentences == 30_000
    assert peak < 1_000_000  # 3.7 MB where the sentences were held


def test_byte_order_mark_is_no_text(tmp_path):
    assert read_documents([write(tmp_path / "a.txt", "\ufeffOne.")]) == [["One."]]


def test_splitting_loses_no_character():
    alphabet = "aB é.!?()\"'1∯文\n"
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices(alphabet, k=generator.randrange(60)))
        sentences = corpus.split_sentences(text)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert all(sentence == sentence.strip() != "" for sentence in sentences)


def test_abbreviations_names_and_list_markers_do_not_end_sentences():
    text = "1. Dr. Smith paid 3.5 dollars, e.g. in cash for tf.Tensor. 2. He left at once."
    assert corpus.split_sentences(text) == [
        "1. Dr. Smith paid 3.5 dollars, e.g. in cash for tf.Tensor.",
        "2. He left at once.",
    ]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"fine\n\xff\xfe\n", r"a\.txt, line 2: text must be UTF-8"),
        ("a.txt", b"fine\r\r\xff\r", r"a\.txt, line 3: text must be UTF-8"),
        ("a.txt", b" \n\n", r"a\.txt must hold at least one sentence"),
        ("a.jsonl", b'{"text": " "}\n', r"a\.jsonl must hold at least one sentence"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz must be a complete gzip file"),
        ("a.txt.gz", gzip.compress(b"fish\n" * 9, mtime=0)[:-4], r"a\.txt\.gz must be a complete gzip file"),
        ("a.json", b'{"text": "x y."}\n{"text": ', r"a\.json, line 2: must be a JSON object"),
        ("a.json", b'{"text": ' + b"[" * 100_000 + b"\n", r"a\.json, line 1: must be a JSON object"),
        ("a.json", b'{"n": ' + b"9" * 9_999 + b"}\n", r"a\.json, line 1: must be a JSON object"),
        ("a.json", b"[1]\n", r"a\.json, line 1: must be a JSON object\. Received: list"),
        ("a.json", b'{"body": "x", "id": 3}\n', r"a\.json, line 1: .*Received: body \(str\), id \(int\)"),
        ("a.json", b'{"text": 3}\n', r"Received: text \(int\)"),
        ("a.json", b'{"text": 3, "paragraphs": null}\n', r"Received: text \(int\), paragraphs \(NoneType\)"),
        (
            "a.json",
            b'{"text": null, "paragraphs": [3]}\n',
            r"Received: text \(NoneType\), paragraphs \(list\)",
        ),
        ("a.json", b'{"body": null}\n', r"Received: body \(NoneType\)"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_documents([tmp_path / name])


@pytest.mark.parametrize("is_verbatim", [False, True])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_what_does_not_fit_into_memory_is_named(tmp_path, monkeypatch, name, is_verbatim):
    """A small .gz of one endless line ended in a `MemoryError` without a word."""

    def grow(pieces):
        raise MemoryError

    monkeypatch.setattr(corpus, "_split_lines", grow)
    path = write(tmp_path / name, '{"text": "One."}\n')
    with pytest.raises(MemoryError, match=rf"/{name} must have lines and documents that fit into memory\."):
        list(corpus.TextDocuments((str(path),), is_verbatim))
