"""The examples in Python of the API page, README and the packing page run, one after another."""

import inspect
import re
from pathlib import Path

import pytest

import bert_packed
from bert_packed.evaluation.inference import TextEncoder

ROOT = Path(__file__).parent.parent
NAMES = "README.md", "docs/reference/api.md", "docs/guides/packing.md"
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
TORCH = "from transformers import"  # an extra; what comes after it in its section may need it, too

TRAINS = "bert_packed.load_encoder", "bert_packed.pretrain"  # a section with one of these trains


def examples(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def sections(page, trains=None):
    """Sections of a page, those whose examples train or the others; None for all."""
    found = PAGES[page].split("\n## ")
    return [section for section in found if trains in (None, any(name in section for name in TRAINS))]


def run(page, with_torch=False, trains=False):
    """Run a page's examples; returns how many they were."""
    names, number = {"bert_packed": bert_packed}, 0
    for section in sections(page, trains):
        for example in examples(section if with_torch else section.partition(TORCH)[0]):
            number += 1
            exec(compile(example, f"{page}, example {number}", "exec"), names)
    return number


def test_every_name_is_on_the_page():
    page = PAGES["docs/reference/api.md"]
    named = {name for name in bert_packed.__all__ if f"bert_packed.{name}(" in page or f"`{name}`" in page}
    assert named == set(bert_packed.__all__)


def test_signatures_are_those_of_the_functions():
    shown = " ".join(PAGES["docs/reference/api.md"].partition("\n## ")[0].split())
    functions = [getattr(bert_packed, name) for name in bert_packed.__all__]
    functions = [one for one in functions if inspect.isfunction(one)]
    assert len(functions) == 13
    for one in (bert_packed.load_encoder, bert_packed.load_classifier):  # pages have their many arguments
        functions.remove(one)
    for one in (*functions, TextEncoder.encode):
        signature = str(inspect.signature(one)).replace("'", '"').replace("(self, ", "(")
        assert f"{one.__name__}{signature}" in shown


def test_the_examples_run():
    assert run("README.md") == len(examples(PAGES["README.md"])) >= 1
    assert run("docs/reference/api.md") >= 7
    assert run("docs/guides/packing.md") >= 5


@pytest.mark.slow
def test_the_examples_that_train_run():
    assert run("docs/reference/api.md", trains=True) == 4


def test_the_examples_with_torch_run():
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason="pip install -e '.[reference]'")
    numbers = [len(examples(section)) for section in sections("docs/reference/api.md", trains=False)]
    assert run("docs/reference/api.md", with_torch=True) == sum(numbers) >= 9
