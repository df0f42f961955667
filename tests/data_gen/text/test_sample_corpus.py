"""The embedded corpus is prose, from every source, without repetition."""

import ast
import itertools
import warnings

from data_gen.text import sample_corpus

DOCSTRING = """Return the number of words that stand in the given text.

The `text` is read once, see :func:`~os.path.join` and [the guide](https://example.org) [1]_.
Words are **counted** as they come.

Parameters
----------
text : str
    The text whose words are to be counted by this function.

Returns
-------
The number of words, which is never below zero and always finite.

Notes
-----
The method `__len__` is not called, because that would count the characters.

    this block is code and must be dropped from the text.

>>> count_words("It is a doctest and must be dropped too.")
9

* A list of things with many words is no prose either.

Args:
  text: The text whose words are to be counted by this function.

| a table | of many words | that ends well | and even with a full stop. |

x = f(1) + g(2) * h[3] - k(x, y) for some a_1, b_2 in {0, 1}.
"""


def test_only_prose_is_kept():
    assert sample_corpus.prose_paragraphs(DOCSTRING) == [
        "Return the number of words that stand in the given text.",
        "The text is read once, see os.path.join and the guide. Words are counted as they come.",
        "The method __len__ is not called, because that would count the characters.",
    ]


def test_topics_describe_methods_in_indented_blocks():
    text = "object.__del__(self)\n\n   Called when the instance is about to be destroyed."
    assert sample_corpus.prose_paragraphs(text) == []
    assert sample_corpus.prose_paragraphs(text, any_indent=True) == [
        "Called when the instance is about to be destroyed."
    ]


def test_sources_with_invalid_escapes_or_syntax_are_quiet(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """First."""\n    return "\\d"\n\nclass C:\n    """Second."""\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sample_corpus._docstrings(path)) == ["First.", "Second."]
    path.write_text('"""Broken."""\ndef {{ name }}')
    assert list(sample_corpus._docstrings(path)) == []


def test_documents_are_prose_and_never_repeat(monkeypatch):
    # the standard library alone: parsing TensorFlow's sources takes seconds
    monkeypatch.setattr(sample_corpus, "PACKAGES", ("no_such_package",))
    documents = list(itertools.islice(sample_corpus.read_sample_documents(), 300))
    assert len(documents) == 300
    assert documents == list(itertools.islice(sample_corpus.read_sample_documents(), 300))
    sentences = [sentence for document in documents for sentence in document]
    assert len(set(sentences)) > 0.95 * len(sentences)
    assert all(len(document) >= 2 for document in documents)
    assert sum(">>>" in sentence for sentence in sentences) <= 2  # pydoc explains the prompt
    letters = sum(character.isalpha() for sentence in sentences for character in sentence)
    assert letters > 0.75 * sum(len(sentence) for sentence in sentences)


def test_short_documents_and_single_sentences_are_left_out(monkeypatch):
    long = "Whoever reads this sentence has read enough words of it to know that one alone is no document."
    more = "The next sentence makes a document of the two, since it is long enough as well."
    again = long.replace("Whoever", "Everyone who")
    texts = [f"{long} {more}", again, "These are just six short words. They are not twenty."]
    monkeypatch.setattr(sample_corpus, "_texts", lambda _: iter((text, False) for text in texts))
    assert list(sample_corpus.read_sample_documents()) == [[long, more]]


def test_definitions_are_found_in_the_order_of_all_nodes():
    """In whatever statement they stand, and nowhere else."""
    source = """
try:
    def a(): pass
except OSError:
    class B:
        def c(self): pass
else:
    if x: pass
    else:
        async def d(): pass
finally:
    match y:
        case 1:
            def e(): pass
with z:
    for _ in w:
        def f(): return [lambda: g for g in h]
"""
    for tree in (ast.parse(source), ast.parse(sample_corpus.Path(ast.__file__).read_bytes())):
        wanted = [node for node in ast.walk(tree) if isinstance(node, sample_corpus.DOCUMENTED)]
        assert [
            n for n in sample_corpus._statements(tree) if isinstance(n, sample_corpus.DOCUMENTED)
        ] == wanted
    assert len(wanted) > 100


def test_processes_give_the_texts_of_files_in_their_order(tmp_path):
    paths = [tmp_path / f"{number}.py" for number in range(70)]  # in parts of 32
    for number, path in enumerate(paths):
        path.write_text(f'"""Of {number}."""\n' * (number % 3))
    found = list(sample_corpus._of_each(paths, 2))
    assert found == [[f"Of {number}."] if number % 3 else [] for number in range(70)]


def test_every_package_is_read(monkeypatch, tmp_path):
    for name in ("library", "numpy", "tensorflow"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "a.py").write_text(f'"""Of {name}."""')
        (tmp_path / name / "tests/b.py").write_text('"""Of tests."""')
    monkeypatch.setattr(sample_corpus, "PACKAGES", ("numpy", "tensorflow"))
    monkeypatch.setattr(sample_corpus, "_package_folder", tmp_path.joinpath)
    monkeypatch.setattr(sample_corpus.sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    found = list(sample_corpus._texts(1))
    assert found == [(f"Of {name}.", False) for name in ("library", "numpy", "tensorflow")]


def test_every_package_has_its_docstrings():
    for name in sample_corpus.PACKAGES:
        assert (sample_corpus._package_folder(name) / "__init__.py").is_file()
    assert len(sample_corpus._topics(sample_corpus.Path(ast.__file__).parent)) > 50
