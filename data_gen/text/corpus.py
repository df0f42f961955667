"""Text files as numbered sentences of documents, read one at a time.

Two formats, each plain or gzipped (`.gz`), and tables (`arrow_tables.py`):

    one sentence per line, a blank line between documents      any other name
    JSON lines with `text` or `paragraphs`, one document each   .json, .jsonl, .ndjson
    rows with `text` or `paragraphs`, one document each         .parquet, .arrow

A line ends with LF, CR LF, or CR alone. `sentencex`, Wikimedia's rule-based splitter, finds the sentences of
JSON documents and tables. `read_texts` neither splits nor strips.
"""

import ast
import dataclasses
import gzip
import io
import json
import sys
import sysconfig
import textwrap
import zlib
from pathlib import Path

import sentencex

from bert_packed.core import progress, storage
from bert_packed.core.settings import InputError
from bert_packed.text import tokenization

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
SEPARATED_SUFFIXES = (".csv", ".tsv")  # nothing reads these
LINES_PER_REPORT = 64  # asking a file for its position is a system call
LONG_LINE = 2**16  # characters: a book in a line of JSON is reported by itself


def read_sentences(paths, column="text"):
    """Yield (document number, sentence) of text files, paths or URLs, in order.

        "One fish.", "Two fish.", "", "Red fish."   ->   (1, "One fish.") (1, "Two fish.") (2, "Red fish.")

    Documents are numbered from 1 in each file, JSON documents and rows without text too. Sentences are
    stripped and not empty. An `InputError` names the file and, where there is one, the line. `column` is the
    name of the text in JSON lines and tables.
    """

    def read(path):
        return _split_contents(path, column) if _has_contents(path) else _read_document_lines(path)

    return _read_files(paths, read)


def read_texts(paths, most_characters, column="text"):
    r"""Yield (document number, text), with spaces, and lines joined by line ends.

        "One fish.", "  Two fish.", "", "Red fish."   ->   (1, "One fish.\n  Two fish.") (2, "Red fish.")

    A document of lines with more than `most_characters` comes in pieces of about this size, whose
    concatenation is its text. Blank documents are numbered, but left out. Raises as `read_sentences`.
    """

    def read(path):
        has_contents = _has_contents(path)
        lines = _join_contents(path, column) if has_contents else _read_document_lines(path, is_verbatim=True)
        return (each for each in join_lines(lines, most_characters) if each[1].strip())

    return _read_files(paths, read)


def _read_files(paths, read):
    """Yield what `read` yields for each file; an error where a file gives nothing, or a line too large."""
    for path in paths:
        is_empty = True
        try:
            for numbered in read(path):
                is_empty = False
                yield numbered
        except MemoryError as error:  # such as that of a small .gz of one endless line
            raise MemoryError(
                f"{path} must have lines and documents that fit into memory. Received: a larger one."
            ) from error
        if is_empty:
            raise InputError(f"{path} must hold at least one sentence. Received: an empty file.")


def join_lines(lines, most_characters):
    """Join the lines of each document, from (document number, line): yields as `read_texts`."""
    held, held_number, num_characters = [], 0, 0
    for number, line in lines:
        if held and (number != held_number or num_characters >= most_characters):
            yield held_number, "\n".join(held)
            # a continued document's next piece begins with the line end between the two
            held, num_characters = [""] if number == held_number else [], 0
        held.append(line)
        held_number = number
        num_characters += len(line) + 1
    if held:
        yield held_number, "\n".join(held)


@dataclasses.dataclass(frozen=True)
class TextDocuments:
    """The numbered sentences or verbatim texts of files, read again in each iteration."""

    paths: tuple[str, ...]
    is_verbatim: bool
    column: str = "text"

    def __iter__(self):
        if self.is_verbatim:
            return read_texts(self.paths, tokenization.ENCODE_CHARACTERS, self.column)
        return read_sentences(self.paths, self.column)


def find_line(path, number):
    """The line where document `number` begins, both from 1; None in tables, and if there is none."""
    if is_table(path):
        return None
    is_json, found, before = _is_json(path), 0, ""
    for line_number, line in read_lines(path):
        found += bool(line) and (is_json or not before)
        if found == number:
            return line_number
        before = line
    return None


def split_sentences(paragraph):
    """Split a paragraph into stripped, nonempty sentences, without losing a non-space character.

    A fragment without a letter, such as the marker of a numbered list, joins the next sentence, names with a
    full stop stay whole, and line breaks count as spaces:

        "1. Open a.B first. 2. Read it."  ->  ["1. Open a.B first.", "2. Read it."]
    """
    sentences, held = [], ""
    for part in sentencex.segment("en", " ".join(paragraph.split())):
        held += part
        sentence = held.strip()
        # A full stop without a space after it is part of a name: tf.Tensor, 3.5, example.org
        is_within_name = part.endswith(".")
        if any(character.isalpha() for character in sentence) and not is_within_name:
            sentences.append(sentence)
            held = ""
    return [*sentences, held.strip()] if held.strip() else sentences


def is_table(path):
    return str(path).lower().endswith(TABLE_SUFFIXES)


def is_separated(path):
    return _without_gz(path).endswith(SEPARATED_SUFFIXES)


def _has_contents(path):
    """True if documents are not separated by blank lines."""
    return is_table(path) or _is_json(path)


def _is_json(path):
    return _without_gz(path).endswith(JSON_SUFFIXES)


def _without_gz(path):
    return str(path).lower().removesuffix(".gz")


def read_lines(path, is_verbatim=False):
    """Yield (line number from 1, text) of a plain or gzipped file, stripped unless `is_verbatim`."""
    number = place = 0
    is_gzip = str(path).lower().endswith(".gz")
    try:
        with (
            storage.open_file(path) as raw,
            gzip.GzipFile(fileobj=raw, mode="rb") if is_gzip else raw as file,
            # A byte is a character of Latin-1: each line is decoded below, so that errors can name it
            io.TextIOWrapper(file, "latin-1") as lines,
        ):
            for number, line in enumerate(lines, 1):
                if number % LINES_PER_REPORT == 0 or len(line) > LONG_LINE:
                    before, place = place, raw.tell()  # bytes of the file, which may be compressed
                    progress.advance(place - before)
                # Windows editors open a file with a byte order mark, which utf-8-sig drops
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                text = line.removesuffix("\n").encode("latin-1").decode(encoding)
                yield number, text if is_verbatim else text.strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number}: text must be UTF-8. Received: {error}.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} must be a complete gzip file. Received: {error}.") from error


def _read_document_lines(path, is_verbatim=False):
    """Yield (document number from 1, line) of a file with blank lines between documents."""
    number, was_blank = 0, True
    for _, line in read_lines(path, is_verbatim):
        is_blank = not line.strip()
        if not is_blank:
            number += was_blank
            yield number, line
        was_blank = is_blank


def _split_contents(path, column):
    for document, text_or_paragraphs in _read_contents(path, column):
        if isinstance(text_or_paragraphs, str):
            # Extracted dumps have a paragraph or heading on each line; joining lines would merge headings
            # with sentences
            text_or_paragraphs = text_or_paragraphs.splitlines()
        for paragraph in text_or_paragraphs:
            for sentence in split_sentences(_without_lone_surrogates(paragraph)):
                yield document, sentence


def _join_contents(path, column):
    for document, found in _read_contents(path, column):
        yield document, _without_lone_surrogates(found if isinstance(found, str) else "\n".join(found))


def _read_contents(path, column):
    """Yield (document number from 1, its text or list of paragraphs) of JSON lines or a table."""
    if not is_table(path):
        yield from _read_json_documents(path, column)
        return
    from data_gen.text import arrow_tables  # an extra

    yield from arrow_tables.read_rows(path, column)


def _read_json_documents(path, column):
    document = 0
    for number, line in read_lines(path):
        if not line:
            continue
        document += 1
        place = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number or a nesting beyond Python's limits
            raise InputError(f"{place}: must be a JSON object. Received: {error}.") from error
        yield document, _find_text(content, place, column)


def _without_lone_surrogates(text):
    r"""Replace lone surrogates, such as `"\ud800"` in JSON, by U+FFFD, which BERT's cleaning drops."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _find_text(content, place, column):
    if not isinstance(content, dict):
        raise InputError(f"{place}: must be a JSON object. Received: {type(content).__name__}.")
    names = ("text", "paragraphs") if column == "text" else (column, column)
    text, paragraphs = map(content.get, names)
    if isinstance(text, str):
        return text
    if isinstance(paragraphs, list) and all(isinstance(each, str | None) for each in paragraphs):
        return [paragraph or "" for paragraph in paragraphs]
    if content.keys() & {*names} and text is paragraphs is None:
        return ""  # null, as in a table
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in content.items()) or "no key"
    raise InputError(
        f"{place}: a document must have `{names[0]}` (a string) or `{names[1]}` (a list of strings). "
        f"Received: {found}."
    )


NAME = "embedded sample corpus"
# Some distributions of Python change these or leave them out
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
