"""The sample corpus is prose, the same in every reading, and what any Python of this version has."""

import itertools
import sys

from data_gen.pack_config import PackConfig
from data_gen.sample_data import pack_sample_corpus
from data_gen.text import corpus

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


def test_documents_are_the_same_again_and_no_paragraph_comes_twice(monkeypatch):
    documents = list(itertools.islice(corpus.read_sample_documents(), 300))
    assert documents == list(itertools.islice(corpus.read_sample_documents(), 300))
    assert all(len(document) >= corpus.MIN_DOCUMENT_SENTENCES for document in documents)
    text = "One sentence of five words.\n\nTwo sentences of five words."
    monkeypatch.setattr(corpus, "_texts", lambda: iter([text, text, "Three sentences, and a\nlittle more."]))
    assert list(corpus.read_sample_documents()) == [
        ["One sentence of five words.", "Two sentences of five words."]
    ]


def test_installed_packages_and_what_distributions_change_are_not_read(monkeypatch, tmp_path):
    kept, left = ("email/__init__.py", "json.py"), ("site.py", "tkinter/__init__.py", "email/sub/__init__.py")
    for name in (*kept, *left, "numpy.py", "numpy/a.py", "site-packages/numpy/a.py", "site-packages/json.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'"""{name}"""\n\n\nclass A:\n    """Of a class."""\n')
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    texts = list(corpus._texts())
    assert texts[-4:] == [kept[0], "Of a class.", kept[1], "Of a class."]
    assert len(texts) > 50 and {"site", "tkinter"} <= sys.stdlib_module_names  # topics before them
    assert texts.count("Of a class.") == 2


def test_the_packing_factor_of_the_sample_corpus(monkeypatch, tmp_path):
    """Its documents are shorter than Wikipedia's; all of them are in one split or the other."""
    monkeypatch.chdir(tmp_path)
    manifests = pack_sample_corpus(PackConfig(max_seq_length=512, num_workers=1, num_shards=1))
    assert manifests.keys() == {"train", "eval"}
    assert manifests["train"]["packing_factor"] >= 2
    assert 1000 < manifests["train"]["num_sequences"] < 20_000
