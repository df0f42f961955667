"""Real English text that every machine has: the documentation inside the Python installation.

pydoc's topics and the docstrings of the standard library, NumPy, SciPy, Keras and TensorFlow, one document
each. Source files are parsed, never imported. Only prose is kept: no code, doctests, tables, parameter
listings or headings, and no paragraph twice. The text depends on the installed versions, and on nothing else.
"""

import ast
import importlib.util
import re
import sysconfig
import textwrap
import warnings
from pathlib import Path

from data_gen.jobs.runners import start_workers, telling_lost_workers
from data_gen.text.corpus import split_sentences

NAME = "embedded sample corpus"
PACKAGES = ("numpy", "scipy", "keras", "tensorflow")
# Tests explain little; the others are generated re-exports, or hold a second copy of the same docstrings.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "site-packages", "dist-packages", "lib2to3", "idlelib", "_api", "v1", "v2"}
)
# Fields that hold statements, or handlers and cases, which hold statements, in the order of each node
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

FILES_AT_ONCE = 32  # handed to one process
MIN_PARAGRAPH_WORDS = 6
MIN_DOCUMENT_WORDS = 20
MIN_DOCUMENT_SENTENCES = 2
MIN_WORD_SHARE = 0.75  # of a paragraph's tokens that are plain words; formulas and signatures have fewer

PLAIN_WORD = re.compile(r"""["'(]*[A-Za-z]+(?:['-][A-Za-z]+)*["')]*[.,;:!?]*["')]*""")
SENTENCE_END = re.compile(r"""[.!?:]["')]*$""")
LISTING_LINE = re.compile(r"[*+-] |\d+[.)] |>>> |\.\.\. |\.\. |[|+@#]|.*(?:```|~~~|  \S+ : |\s{3}\S)")
UNDERLINE = re.compile(r"[=\-~*^#]{3,}$")
# NumPy-style sections that list names rather than explain
LISTING_SECTIONS = frozenset(
    {"parameters", "other parameters", "returns", "yields", "receives", "raises", "warns"}
    | {"attributes", "methods", "see also", "examples", "references"}
)
ROLE = re.compile(r":[\w:+-]+:`[~!]?([^`<]+?)(?: <[^`]*>)?`")
LINK = re.compile(r"\[([^]\n]+)\]\([^)\n]+\)")
FOOTNOTE = re.compile(r"\s?\[[\w#]+\]_?")
MARKUP = re.compile(r"`+(?:__?(?!\w))?|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)")


def read_sample_documents(num_workers=1):
    """Read the embedded corpus.

    Args:
        num_workers: Processes that parse the sources; 1 = this one.

    Yields:
        List of sentences, one list a topic or docstring, in a fixed order.
    """
    seen = set()
    for text, is_topic in _texts(num_workers):
        paragraphs = [paragraph for paragraph in prose_paragraphs(text, is_topic) if paragraph not in seen]
        seen.update(paragraphs)
        sentences = [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph)]
        num_words = sum(len(sentence.split()) for sentence in sentences)
        if len(sentences) >= MIN_DOCUMENT_SENTENCES and num_words >= MIN_DOCUMENT_WORDS:
            yield sentences


def prose_paragraphs(text, any_indent=False):
    """The paragraphs of a docstring that are prose, as single lines without markup.

        Parameters        ->  (a listing: dropped, section and all)
        ----------
        x : int
            The number.

        Notes             ->  (the heading is dropped)
        -----
        The `x` that is   ->  "The x that is given must be small enough for the table."
        given must be small enough for the table.

    Args:
        text: Docstring without its common indentation.
        any_indent: Whether indented blocks may be prose, as in pydoc's topics, where they describe a
            method; in docstrings they are code or descriptions of arguments.

    Returns:
        List of str.
    """
    paragraphs = []
    section = ""
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        if len(lines) > 1 and UNDERLINE.match(lines[1].strip()):
            section = lines[0].strip().lower()
            lines = lines[2:]
        if section in LISTING_SECTIONS or not lines:
            continue
        indents = {len(line) - len(line.lstrip()) for line in lines}
        if len(indents) > 1 or (not any_indent and indents != {0}):
            continue
        if any(LISTING_LINE.match(line.strip()) for line in lines):
            continue
        paragraph = _strip_markup(" ".join(line.strip() for line in lines))
        if _is_prose(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def _is_prose(paragraph):
    words = paragraph.split()
    if len(words) < MIN_PARAGRAPH_WORDS or not SENTENCE_END.search(paragraph):
        return False
    num_plain = sum(bool(PLAIN_WORD.fullmatch(word)) for word in words)
    return num_plain >= MIN_WORD_SHARE * len(words) and words[0][0].isupper()


def _strip_markup(text):
    text = LINK.sub(r"\1", ROLE.sub(r"\1", text))
    return " ".join(MARKUP.sub("", FOOTNOTE.sub("", text)).split())


def _texts(num_workers):
    """Yield (text, whether it is a pydoc topic)."""
    folder = Path(sysconfig.get_path("stdlib"))
    for text in _topics(folder):
        yield text, True
    paths = [
        path
        for root in (folder, *map(_package_folder, PACKAGES))
        for path in (sorted(root.rglob("*.py")) if root else ())
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    for texts in _of_each(paths, num_workers):
        for text in texts:
            yield text, False


def _of_each(paths, num_workers):
    """The `_docstrings` of files, in their order."""
    if num_workers == 1:
        yield from map(_docstrings, paths)
        return
    pool = start_workers(num_workers)
    try:
        with telling_lost_workers():
            yield from pool.map(_docstrings, paths, chunksize=FILES_AT_ONCE)
    finally:  # whoever wanted some texts only has them
        pool.shutdown(cancel_futures=True)


def _topics(folder):
    """The values of the one dict in pydoc's topics, in the order of their names."""
    path = folder / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    for node in _parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return [textwrap.dedent(topics[name]) for name in sorted(topics)]
    return []


def _package_folder(name):
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _docstrings(path):
    """The docstrings of a source file, in the order of the file: list of str."""
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return []  # parsing is what takes the time
    nodes = [node for node in _statements(_parse(source)) if isinstance(node, DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for text in map(ast.get_docstring, nodes) if text]


def _statements(tree):
    """What `ast.walk` yields, in its order, without the expressions, which hold no definitions.

    These are most of a file's nodes: to walk through them took longer than all else but the parser.
    """
    nodes = [tree]
    for node in nodes:
        for name in BLOCKS:
            nodes.extend(getattr(node, name, ()))
    return nodes


def _parse(source):
    with warnings.catch_warnings():
        # of other people's invalid escapes, which are SyntaxWarning from Python 3.12 on
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return ast.Module([], [])  # templates and deliberately broken files
