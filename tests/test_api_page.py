"""The examples of docs/api.md, and those in Python of README.md, run one after another."""

import re
from pathlib import Path

import pytest

import bert_packed

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/api.md")}
TORCH = "from transformers import"  # an extra; what comes after it in its section may need it, too


def examples(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(page, with_torch=False):
    """Run a page's examples; returns how many they were."""
    names, number = {}, 0
    for section in PAGES[page].split("\n## "):
        for example in examples(section if with_torch else section.partition(TORCH)[0]):
            number += 1
            exec(compile(example, f"{page}, example {number}", "exec"), names)
    return number


def test_every_name_is_on_the_page():
    page = PAGES["docs/api.md"]
    assert not [
        name for name in bert_packed.__all__ if f"bert_packed.{name}(" not in page and f"`{name}`" not in page
    ]


def test_the_examples_run():
    assert run("README.md") == len(examples(PAGES["README.md"])) >= 1
    assert run("docs/api.md") >= 8


def test_the_examples_with_torch_run():
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason="pip install -e '.[reference]'")
    assert run("docs/api.md", with_torch=True) == len(examples(PAGES["docs/api.md"])) >= 10
