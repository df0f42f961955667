"""The examples of docs/api.md run, one after another."""

import re
from pathlib import Path

import pytest

import bert_packed

PAGE = Path(__file__).parent.parent / "docs/api.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_every_name_is_on_the_page():
    assert not [name for name in bert_packed.__all__ if f"bert_packed.{name}(" not in PAGE.read_text()]


def test_the_examples_run():
    names = {}
    for number, example in enumerate(EXAMPLES):
        if "import torch" in example:
            for package in ("torch", "transformers"):
                pytest.importorskip(package, reason="pip install -e '.[reference]'")
        exec(compile(example, f"{PAGE.name}, example {number + 1}", "exec"), names)
    assert number + 1 == len(EXAMPLES) >= 8
