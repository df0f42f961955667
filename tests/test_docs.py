"""Pages are short, their links lead somewhere, and what they name exists; what must be on them is."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
from benchmark_command import config_class
from test_imports import GENERATORS, HALVES, ORDER

import bert_packed
from bert_packed.evaluation.inference import TextEncoder
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.squad.config import SquadConfig
from docs import write_flags

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = (*HALVES, "benchmarks")
# Modules are named from the top or from the half that the text is about, folders from the top
PATH = re.compile(
    r"`((?:[a-z_]+/)+[a-z_]+\.py|(?:data_gen|bert_packed|benchmarks|tests|configs|docs)/[a-z_/]*)`"
)
FILE = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
WIDTH, HEIGHT = 120, 250  # of a page without tables that programs write, in characters and lines
# Records of what was measured, and pages that programs write, have any size
RECORDS = (
    *("docs/notebook/", "docs/evidence/packing_tables.md", "docs/evidence/results.md"),
    *("docs/reference/flags.md", "CHANGELOG.md"),
)


def page_id(path):
    return str(path.relative_to(ROOT))


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_id)
def test_pages_are_short_and_what_they_name_is_there(page):
    name, text = page_id(page), page.read_text()
    for target, anchor in LINK.findall(text):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
    tops = [ROOT, *(ROOT / half for half in FOLDERS)]
    lost = [path for path in PATH.findall(text) if not any((top / path).exists() for top in tops)]
    assert name == "CHANGELOG.md" or not lost
    if not name.startswith(RECORDS):
        lines = text.splitlines()
        wide = [number for number, line in enumerate(lines, 1) if len(line) > WIDTH]
        assert not wide, f"lines of more than {WIDTH} characters: {wide}"
        assert len(lines) <= HEIGHT, f"{len(lines)} lines, of {HEIGHT} at most"


def test_figures_of_the_readme_are_those_of_the_results():
    section = (ROOT / "README.md").read_text().partition("\n## Figures\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    results = (ROOT / "docs/evidence/results.md").read_text()
    assert len(rows) == 5 and "docs/evidence/results.md" in section
    for row in rows:
        figures = re.findall(r"\d[\d.,]*\d", row.rstrip(" |").rpartition("|")[2])
        assert figures and not [one for one in figures if one not in results], row


def test_files_that_a_docstring_names_exist():
    paths = [path for half in FOLDERS for path in (ROOT / half).rglob("*.py")]
    there = [f"/{path.relative_to(ROOT).as_posix()}" for path in (*paths, *(ROOT / "tests").rglob("*.py"))]
    there += [f"/{path.name}" for path in ROOT.glob("*.py")]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    named = {
        (path.name, name)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
        for name in FILE.findall(ast.get_docstring(node) or "")
    }
    assert len(named) > 50
    assert not {(path, name) for path, name in named if not any(t.endswith(f"/{name}") for t in there)}


def test_names_of_code_on_the_tour_are_there():
    """A row named a constant of `setup.py` that was gone."""
    named = set(re.findall(r"`([A-Z]\w+)`", (ROOT / "docs/reference/architecture.md").read_text()))
    text = "\n".join(path.read_text() for half in FOLDERS for path in (ROOT / half).rglob("*.py"))
    assert len(named) >= 5
    assert not [name for name in named if not re.search(rf"^(class {name}\b|{name} = )", text, re.MULTILINE)]


def test_the_tour_names_every_folder_in_their_order():
    page = (ROOT / "docs/reference/architecture.md").read_text()
    for head, half, order in (
        ("| ground floor of `bert_packed/`", "bert_packed.", ORDER),
        ("| `data_gen/` |", "data_gen.", GENERATORS),
    ):
        names = [name for name in order if (ROOT / half[:-1] / name).is_dir()]
        names = names[: names.index("text_to_model")] if "text_to_model" in names else names
        table = page[page.index(head) :]
        places = [table.find(f"`{name}/`") for name in names]
        assert places == sorted(places) and min(places) > 0 and len(names) > 1, names


@pytest.mark.parametrize(
    ("start", "configs"),
    [
        ("What changes no result may change", [PretrainingConfig]),
        ("in fine-tuning also", [SquadConfig, GlueConfig, NerConfig]),
    ],
)
def test_flags_that_may_change_are_those_of_the_settings(start, configs):
    page = " ".join((ROOT / "docs/reference/runs.md").read_text().split())
    (listed,) = re.findall(rf"{start}: ([^.;]*)[.;]", page)
    fields = {field.name: field.metadata for config in configs for field in dataclasses.fields(config)}
    of_runs = {field.name for field in dataclasses.fields(PretrainingConfig)} if len(configs) > 1 else ()
    # What is of one call alone, as --json, needs no list
    wanted = [
        f"--{name}"
        for name, of in fields.items()
        if of["changeable"] and not of["transient"] and name not in of_runs
    ]
    assert sorted(re.findall(r"--\w+", listed)) == sorted(wanted)


def test_the_page_of_flags_is_that_of_the_settings():
    is_same = write_flags.PAGE.read_text() == write_flags.page()
    assert is_same, "docs/reference/flags.md is not that of the settings: run `python -m docs.write_flags`"


def test_flagfiles_have_the_micro_batches_of_the_page():
    """The header of each flagfile of pre-training, and the table of docs/reference/compiling.md."""
    page = (ROOT / "docs/reference/compiling.md").read_text()
    rows = re.findall(r"^\| (`.*) \|$", page.partition("| recipe |")[2].partition("\n\n")[0], re.MULTILINE)
    table = {}
    for names, *cells in (row.split(" | ") for row in rows):
        table |= {name: cells[1:] for name in re.findall(r"`([a-z0-9-]+)`", names)}
    flagfiles = {path.stem for path in (ROOT / "configs").glob("*.flags")} - {"squad"}
    assert table.keys() == flagfiles
    for name, (packs, v5e, h100) in table.items():
        text = (ROOT / "configs" / f"{name}.flags").read_text()
        assert f"\n--train_batch_size={packs.replace(',', '')}\n" in text
        whole = f"# Devices    a TPU v5e or an H100 takes all {packs} packs at once"
        header = f"# Devices    largest micro-batch: {v5e} packs on a TPU v5e, {h100} on an H100"
        assert (whole if v5e == h100 == "all" else header) in text, name


API = (ROOT / "docs/reference/api.md").read_text()


def test_every_name_is_on_the_page_of_the_api():
    page = API
    named = {name for name in bert_packed.__all__ if f"bert_packed.{name}(" in page or f"`{name}`" in page}
    assert named == set(bert_packed.__all__)


def test_signatures_are_those_of_the_functions():
    shown = " ".join(API.partition("\n## ")[0].split())
    functions = [getattr(bert_packed, name) for name in bert_packed.__all__]
    functions = [one for one in functions if inspect.isfunction(one)]
    assert len(functions) == 13
    for one in (bert_packed.load_encoder, bert_packed.load_classifier):  # pages have their many arguments
        functions.remove(one)
    for one in (*functions, TextEncoder.encode):
        signature = str(inspect.signature(one)).replace("'", '"').replace("(self, ", "(")
        assert f"{one.__name__}{signature}" in shown


# Each table and figure of the packing papers has a row in evidence/paper.md, with a command that exists
PAPER = (ROOT / "docs/evidence/paper.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAPER.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| Efficient"))
]
# The last table and figure of each paper have these numbers in print
LAST = {"Efficient": {"Table": 6, "Figure": 14}, "Packing": {"Table": 5, "Figure": 12}}


def named(cell):
    """Set of (kind, number) that a cell names: `Figures 1, 9, Section E` -> Figure 1, Figure 9."""
    found, kind = set(), ""
    for word in re.findall(r"[A-Za-z.]*\d+|[A-Z]\b|[A-Za-z]+", cell):
        if word.isdecimal():
            found.add((kind, int(word)))
        elif not word[-1].isdecimal():
            kind = word.removesuffix("s")
    return found


@pytest.mark.parametrize("column", [0, 1])
def test_every_table_and_figure_has_a_row(column):
    paper = list(LAST)[column]
    there = set().union(*(named(row[column]) for row in ROWS))
    assert there == {(kind, n) for kind, last in LAST[paper].items() for n in range(1, last + 1)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}"[:60])
def test_the_command_of_a_row_exists(row):
    assert len(row) == 7
    if not row[3]:
        is_removed = re.search(rf"^{row[6]}\. (.(?!\n\d\.))*since\s+removed", PAPER, re.MULTILINE | re.DOTALL)
        assert row[5] in ("not drawn", "nothing measured") or is_removed
        return
    command, *flags = re.fullmatch(r"`([^`]+)`", row[3])[1].split()
    module = importlib.import_module(f"benchmarks.{command}")
    fields = {field.name for field in dataclasses.fields(config_class(module))}
    assert {flag.removeprefix("--").partition("=")[0] for flag in flags} <= fields
