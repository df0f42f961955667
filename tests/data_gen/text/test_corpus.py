"""Readers return every sentence in its document, and name file and line of what they cannot read."""

import gzip
import itertools
import json
import random
import sys
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


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.json", "a.jsonl.gz", "a.ndjson"])
def test_lines_end_with_lf_cr_lf_or_cr(tmp_path, end, name):
    lines = ["One\u2028fish.", "Two\x0bfish.", "", "Red fish.", "", "", "Blue."]
    expected = [lines[:2], [lines[3]], [lines[6]]]
    if "json" in name:
        rows = [{"paragraphs": DOCUMENTS[0]}, {"text": " ".join(DOCUMENTS[1])}, {"paragraphs": DOCUMENTS[2]}]
        lines, expected = [json.dumps({"title": "x", **row}) for row in rows], DOCUMENTS
    for last in ("", end):
        path = write(tmp_path / name, "\ufeff" + end.join(lines) + last)
        assert read_documents([path]) == expected
        assert [number for number, _ in corpus.read_lines(path)] == list(range(1, len(lines) + 1))


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


def test_splitting_loses_no_character():
    alphabet = "aB é.!?()\"'1∯文\n"
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices(alphabet, k=generator.randrange(60)))
        sentences = corpus.split_sentences(text)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert all(sentence == sentence.strip() != "" for sentence in sentences)


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
        ("a.json", b'{"text": null, "paragraphs": [3]}\n', r": text \(NoneType\), paragraphs \(list\)"),
        ("a.json", b'{"body": null}\n', r"Received: body \(NoneType\)"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_documents([tmp_path / name])


# The sample corpus: prose, the same in every reading, and what any Python of this version has

DOCSTRING = """Return the number of items that are in the table.

Too short.

    indented = code(that, nobody, wants, to, read)

this does not begin with a capital letter, as a listing does.

The first of two lines is a sentence,
and so is the second, which ends it.

Args of this function
  are indented unevenly, so this is no prose.

>>> Nothing that shows a session of Python is prose, though it ends so.

Nor does a heading end with a full stop or anything like it
"""


def test_paragraphs_of_prose_are_kept_and_nothing_else():
    assert corpus.prose_paragraphs(DOCSTRING) == [
        "Return the number of items that are in the table.",
        "The first of two lines is a sentence, and so is the second, which ends it.",
    ]


def test_documents_are_the_same_again_and_all_differ(monkeypatch):
    documents = list(itertools.islice(corpus.read_sample_documents(), 300))
    assert documents == list(itertools.islice(corpus.read_sample_documents(), 300))
    assert all(len(document) >= corpus.MIN_DOCUMENT_SENTENCES for document in documents)
    text = "One sentence of five words.\n\nTwo sentences of five words."
    texts = [text, text, "Three sentences, and a\nlittle more."]
    monkeypatch.setattr(corpus, "_texts", lambda: iter(texts))
    assert list(corpus.read_sample_documents()) == [text.split("\n\n")]


def test_installed_packages_are_not_read(monkeypatch, tmp_path):
    kept, left = ("email/__init__.py", "json.py"), ("site.py", "tkinter/__init__.py", "email/sub/__init__.py")
    for name in (*kept, *left, "numpy.py", "numpy/a.py", "site-packages/numpy/a.py", "site-packages/json.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""{name}"""\n\n\nclass A:\n    """Of a class."""\n')
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    texts = list(corpus._texts())
    assert texts[-4:] == [kept[0], "Of a class.", kept[1], "Of a class."]
    assert len(texts) > 50 and {"site", "tkinter"} <= sys.stdlib_module_names  # topics before them
    assert texts.count("Of a class.") == 2
