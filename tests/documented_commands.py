"""The commands and examples of README and docs, read from the pages; bash itself reads the commands.

Marks, HTML comments, say what a test does not run, and why:

    <!-- not run, whole page: REASON -->         below the page's title
    <!-- not run: REASON -->                     in the line before a block
    <!-- not run (WORD, WORD): REASON -->        of the block the commands with one of these words
    <!-- begins with: PATH of PAGE -->           what another page makes, or NEW = PATH of PAGE
"""

import dataclasses
import re
import subprocess
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("docs/notebook/", "docs/reference/flags.md")  # a diary, and what a program writes
PAGES = {
    name: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not (name := path.relative_to(ROOT).as_posix()).startswith(LEFT_OUT)
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|(?<=-->\n))((?: {4}.*\n|\n(?= {4}))+)")
WHOLE_PAGE = re.compile(r"^<!-- not run, whole page: .+ -->$", re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run(?: \((.+?)\))?: .+ -->\n$")
BEGINS_WITH = re.compile(r"^<!-- begins with: (.+) -->$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
# A line begins with a command's first word, or what may come before one, and is no command's error message
SHELL = re.compile(
    r"(?!bert-packed [a-z-]+: )(?:bert-packed|python3?|pip|hf|zip|tar|git|curl|cd|mkdir|export|for) |"
    r"--\w+=|[A-Za-z_]+=\S"
)
# A page asks its reader to set these
READERS = {"MODEL": "model", "MAMBA": "mamba.json", "MAMBA2": "mamba2.json"}
SPAN_START = re.compile(r"(?:[A-Z_]+=\S+ )?(?:bert-packed|python|pip|hf) ")
PYTHON = re.compile(r"(?:import|from) \w|\w+ = \S|[\w.]+\($", re.MULTILINE)
# Bash has no command to find: each is shown, with the variables that it would have had. One call shows all of
# it, or two commands at a time would mix
RECORD = r"""
command_not_found_handle() {
    local record="" name word
    for name in $(compgen -e); do record+="$name=${!name}"$'\37'; done
    record+=$'\35'
    for word in "$@"; do record+="$word"$'\37'; done
    printf '%s\36' "$record"
}
"""


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a page, or the text of a span of code."""

    kind: str  # "shell", "python" or "" for output, tables and drawings
    text: str  # without indentation and fence
    not_run: tuple = ()  # words of commands that are not run; "" is in all commands

    def is_run(self, line):
        """False for a command, or the first line of an example, that a mark leaves out."""
        return not any(word in line for word in self.not_run)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command as bash would start it: words, and the variables that were set for it."""

    words: tuple[str, ...]
    variables: dict

    def __str__(self):
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])


def blocks(page):
    """The `Block`s of a page's text, fenced and indented, in their order."""
    kinds = {"bash": "shell", "python": "python", "": ""}
    found = [(one.start(), kinds[one[1]], one[2]) for one in FENCED.finditer(page)]
    without = FENCED.sub(lambda one: re.sub(r"[^\n]", "-", one[0]), page)
    for one in INDENTED.finditer(without):
        text = textwrap.dedent(one[1])
        kind = "shell" if SHELL.match(text) else "python" if PYTHON.match(text) else ""
        found.append((one.start(), kind, text))
    return [Block(kind, text, words_not_run(page, start)) for start, kind, text in sorted(found)]


def words_not_run(page, start):
    """`Block.not_run` of the block that begins at a place of a page."""
    if WHOLE_PAGE.search(page):
        return ("",)
    mark = NOT_RUN.search(page, 0, start)
    return tuple((mark[1] or "").split(", ")) if mark else ()


def begins_with(page):
    """Files of other pages that a page begins with: dict from a path to the other page and the path there."""
    found = {}
    for part in [part for mark in BEGINS_WITH.findall(page) for part in mark.split(", ")]:
        path, other = part.split(" of ")
        new, _, old = path.partition(" = ")
        found[new] = other, old or new
    return found


def spans(page):
    """Commands in the running text and in tables, as text."""
    text = re.sub(r"^ {4}.*$", "", FENCED.sub("", page), flags=re.MULTILINE)
    found = [" ".join(one.split()) for one in SPAN.findall(text)]
    return [one for one in found if SPAN_START.match(one) and "NAME" not in one]


def commands(text, folder):
    """The `Command`s that bash would start for lines of a page, in a folder.

    Loops, variables, quotes, comments and continued lines are bash's. Raises `ValueError` where bash
    understands a line otherwise than as commands of others.
    """
    if text.startswith("--"):
        text = f"bert-packed pretrain --input_file=packs --output_dir=run {text}"
    shell = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", f"set -eu\nPATH=/nowhere\n{RECORD}\n{text}\nwait\n"],
        cwd=folder,
        env=READERS,
        capture_output=True,
        text=True,
    )
    if shell.returncode or shell.stderr:
        raise ValueError(f"bash says {shell.stderr!r} of {text!r}")
    found = []
    for record in shell.stdout.split("\36")[:-1]:
        variables, words = (part.split("\37")[:-1] for part in record.split("\35"))
        pairs = dict(one.split("=", 1) for one in variables)
        for name in ("PWD", "OLDPWD", "SHLVL", "_", *READERS):
            pairs.pop(name, None)
        found.append(Command(tuple(words), pairs))
    return found
