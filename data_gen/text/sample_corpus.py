"""Sample text that comes with every Python: pydoc's topics and the docstrings of the standard library.

It depends only on the version of Python, not on installed packages. Source files are parsed, never imported;
paragraphs of prose are kept, without duplicates.
"""

import ast
import sys
import sysconfig
import textwrap
from pathlib import Path

from data_gen.text.corpus import split_sentences

NAME = "embedded sample corpus"
# Changed or left out by some distributions of Python
SKIPPED = {"site", "tkinter", "turtledemo", "idlelib", "lib2to3", "distutils", "ensurepip"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MIN_PARAGRAPH_WORDS = 5
MIN_DOCUMENT_SENTENCES = 2


def read_sample_documents():
    """Yield a list of sentences for each topic or docstring, in a fixed order."""
    seen = set()
    for text in _texts():
        paragraphs = [paragraph for paragraph in prose_paragraphs(text) if paragraph not in seen]
        seen.update(paragraphs)
        sentences = [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph)]
        if len(sentences) >= MIN_DOCUMENT_SENTENCES:
            yield sentences


def prose_paragraphs(text):
    """Paragraphs of prose, one line each: evenly indented, from a capital letter to the end of a sentence."""
    paragraphs = []
    for block in text.split("\n\n"):
        indents = {len(line) - len(line.lstrip()) for line in block.strip("\n").split("\n")}
        paragraph = " ".join(block.split())
        is_sentence = paragraph[:1].isupper() and paragraph.endswith((".", ":", "!", "?"))
        is_long = len(paragraph.split()) >= MIN_PARAGRAPH_WORDS
        if len(indents) == 1 and is_sentence and is_long and ">>>" not in paragraph:
            paragraphs.append(paragraph)
    return paragraphs


def _texts():
    from pydoc_data.topics import topics  # half a megabyte: where it is read

    for name in sorted(topics):
        yield textwrap.dedent(topics[name])
    folder = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names - SKIPPED):
        for path in [*folder.glob(f"{name}.py"), *sorted((folder / name).glob("*.py"))]:
            nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, DOCUMENTED))
            yield from filter(None, map(ast.get_docstring, nodes))
