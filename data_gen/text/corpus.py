"""How text files become documents: lists of sentences, read one document at a time.

Two formats, each plain or gzipped (`.gz`):

    one sentence per line, a blank line between documents      any name
    JSON lines with `text` or `paragraphs`, one document each   .json, .jsonl, .ndjson

Sentences of JSON documents are found by `sentencex`, the rule-based splitter that Wikimedia maintains.
"""

import dataclasses
import gzip
import json
import zlib
from pathlib import Path

import sentencex

from data_gen.cli import progress
from data_gen.cli.settings import InputError
from data_gen.jobs import files

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
LINES_BETWEEN = 64  # looks at how far the reading is


def read_documents(paths):
    """Read the documents of text files, in the order of `paths`.

    Args:
        paths: Iterable of paths.

    Yields:
        List of sentences (str, stripped, not empty), one list a document; empty where a JSON document has
        no text, so that documents are numbered as they stand in the file. None continues into the next file.

    Raises:
        InputError: naming the file and, where there is one, the line: not UTF-8, not gzip, not JSON,
            JSON without `text` or `paragraphs`, or a file without a sentence.
    """
    for path in paths:
        read = _read_json_lines if _is_json(path) else _read_sentence_lines
        num_documents = 0
        for document in read(path):
            num_documents += bool(document)
            yield document
        if not num_documents:
            raise InputError(f"{path} must hold at least one sentence. Received: an empty file.")


@dataclasses.dataclass(frozen=True)
class TextDocuments:
    """The documents of text files, read anew each time they are iterated; see `read_documents`."""

    paths: tuple[str, ...]

    def __iter__(self):
        return read_documents(self.paths)


def find_line(path, number):
    """The line, from 1, where a document of a text file begins; None where the file has not so many.

    Args:
        path: As in `read_documents`.
        number: Of the document in its file, from 1.
    """
    is_json, found, before = _is_json(path), 0, ""
    for line_number, line in _read_lines(path):
        found += bool(line) and (is_json or not before)
        if found == number:
            return line_number
        before = line
    return None


def split_sentences(paragraph, language="en"):
    """Split one paragraph into sentences.

    A fragment without a letter, such as the marker of a numbered list, joins the sentence that follows it,
    and a name with a full stop stays whole:

        "1. Open a.B first. 2. Read it."  ->  ["1. Open a.B first.", "2. Read it."]

    Args:
        paragraph: Text; line breaks count as spaces.
        language: ISO 639-1 code, which chooses the abbreviations.

    Returns:
        List of str, stripped, none empty; every non-space character of the paragraph is in one of them.
    """
    sentences, held = [], ""
    for part in sentencex.segment(language, " ".join(paragraph.split())):
        held += part
        sentence = held.strip()
        # A full stop with no space after it is within a name: tf.Tensor, 3.5, example.org
        is_within_name = part.endswith(".")
        if any(character.isalpha() for character in sentence) and not is_within_name:
            sentences.append(sentence)
            held = ""
    return [*sentences, held.strip()] if held.strip() else sentences


def _is_json(path):
    name = Path(path).name.lower().removesuffix(".gz")
    return name.endswith(JSON_SUFFIXES)


def _read_lines(path):
    """Yield (line number from 1, stripped text) of a plain or gzipped file."""
    number = place = 0
    is_gzip = Path(path).suffix.lower() == ".gz"
    try:
        with files.open_file(path) as raw, gzip.GzipFile(fileobj=raw, mode="rb") if is_gzip else raw as file:
            # Decoding line by line, rather than through the file object, tells which line is at fault.
            for number, line in enumerate(file, 1):
                if number % LINES_BETWEEN == 0:
                    before, place = place, raw.tell()
                    progress.advance(place - before)
                # utf-8-sig: Windows editors open a file with a byte order mark
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number}: text must be UTF-8. Received: {error}.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} must be a complete gzip file. Received: {error}.") from error


def _read_sentence_lines(path):
    document = []
    for _, line in _read_lines(path):
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _read_json_lines(path):
    for number, line in _read_lines(path):
        if not line:
            continue
        place = f"{path}, line {number}"
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number or a nesting beyond Python's limits
            raise InputError(f"{place}: must be a JSON object. Received: {error}.") from error
        paragraphs = [_without_lone_surrogates(paragraph) for paragraph in _paragraphs(content, place)]
        yield [s for paragraph in paragraphs for s in split_sentences(paragraph)]


def _without_lone_surrogates(text):
    r"""Half a character, as `"\ud800"` in JSON, becomes U+FFFD, which BERT's cleaning drops."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _paragraphs(content, place):
    """The paragraphs of one JSON document, as a list of str."""
    if not isinstance(content, dict):
        raise InputError(f"{place}: must be a JSON object. Received: {type(content).__name__}.")
    if isinstance(content.get("text"), str):
        # Extracted dumps put a paragraph or heading on each line; joining lines would glue headings to
        # sentences, which nothing later can undo.
        return content["text"].splitlines()
    paragraphs = content.get("paragraphs")
    if isinstance(paragraphs, list) and all(isinstance(paragraph, str) for paragraph in paragraphs):
        return paragraphs
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in content.items()) or "no key"
    raise InputError(
        f"{place}: a document must have `text` (a string) or `paragraphs` (a list of strings). "
        f"Received: {found}."
    )
