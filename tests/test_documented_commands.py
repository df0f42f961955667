"""Every command of README and docs is one of its program's, and those that are quick run, page by page."""

import ast
import contextlib
import importlib
import inspect
import json
import re
import runpy

import pytest
import setuptools
from documented_commands import PAGES, ROOT, SPAN_START, blocks, commands, spans

import bert_packed  # noqa: F401  examples name it
from bert_packed.__main__ import COMMANDS
from bert_packed.core import command_line
from bert_packed.core.settings import InputError

VARIABLES = {"KERAS_BACKEND", "TF_CONFIG", "JAX_PLATFORMS", "XLA_FLAGS", "BEAM_OPTIONS", "BLEURT_TINY"}
# Files that commands open to read their settings: a flagfile that `train` writes, and data of the reader's
WRITTEN = {"my/flags/pretrain.flags": "--input_file=my/packed/train/*.tfrecord\n"}
WRITTEN |= {
    name: ""
    for name in ("train-v1.1.json", "dev-v1.1.json", "predictions.json", "conll/train.txt", "conll/valid.txt")
}
# Programs of others, by their first words: the words that are left are theirs
OF_OTHERS = ("hf download", "zip -j", "pip download", "pip uninstall", "pip wheel")


@pytest.fixture(scope="module")
def extras():
    """Names of the extras in `setup.py`."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))
        runpy.run_path("setup.py")
    return set(found["extras_require"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder, but for flagfiles that commands write."""
    for name, text in WRITTEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_of(words):
    """The settings class of the program of a command, and its arguments with the program's name."""
    is_ours = words[0] == "bert-packed"
    module, arguments = (COMMANDS[words[1]][0], words[1:]) if is_ours else (words[2], words[2:])
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(SystemExit):
        monkeypatch.setattr(command_line, "run", lambda main, settings, description: found.append(settings))
        runpy.run_path(str(ROOT / f"{module.replace('.', '/')}.py"), run_name="__main__")
    return found[0], arguments


def understand(words, extras):
    """Check a command, a list of words, as its program would at its start; raises what it finds."""
    line = " ".join(words)
    if words[0] == "bert-packed" or line.startswith("python -m benchmarks."):
        return command_line.parse(*settings_of(words))
    if line.startswith("python -c "):
        return check_python(words[2])
    if words[0] == "python":
        paths = words[3:] if line.startswith("python -m pytest") else words[1:2]
        assert all((ROOT / path).exists() for path in paths), line
    elif line.startswith("pip install "):
        for word in words[2:]:
            if named := re.fullmatch(r"(?:\.|dist/bert_packed-.*\.whl)\[([a-z,]+)\]", word):
                assert set(named[1].split(",")) <= extras, line
            else:
                assert re.fullmatch(r"-e|\.|--[a-z-]+(=\S+)?|[a-z][a-z0-9-]*(\[\w+\])?(==[\d.]+)?", word), (
                    line
                )
    else:
        assert line.startswith(OF_OTHERS), line
    return None


def check_python(text):
    """Compile an example; all that it takes from `bert_packed` must be there, with its arguments."""
    tree = ast.parse(text)
    compile(tree, "example", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("bert_packed", "data_gen"):
            module = importlib.import_module(node.module)
            assert not [name.name for name in node.names if not hasattr(module, name.name)], text
        elif isinstance(node, ast.Call) and re.fullmatch(r"bert_packed(\.\w+)+", ast.unparse(node.func)):
            names = {one.arg: None for one in node.keywords}
            inspect.signature(eval(ast.unparse(node.func))).bind(*node.args, **names)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page, folder, extras):
    for block in blocks(PAGES[page]):
        for command in commands(block.text, folder) if block.kind == "shell" else ():
            assert command.variables.keys() <= VARIABLES
            assert command.variables.get("KERAS_BACKEND", "jax") in ("jax", "tensorflow")
            json.loads(command.variables.get("TF_CONFIG", "{}"))
            understand(command.words, extras)
        # A command that is not read as one would be left out without a word
        unread = [line for line in block.text.splitlines() if SPAN_START.match(line)]
        assert block.kind == "shell" or not [one for one in unread if ": error:" not in one]
    for span in spans(PAGES[page]):
        for command in commands(span, folder):
            if len(command.words) > 2:
                try:
                    understand([word for word in command.words if word != "..."], extras)
                except InputError as error:  # of what the span leaves out
                    assert "must be given" in str(error)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "import" in text])
def test_examples_in_python_are_understood(page):
    examples = [block.text for block in blocks(PAGES[page]) if block.kind == "python"]
    if "bert_packed.torch" in "".join(examples):
        pytest.importorskip("torch", reason="pip install -e '.[torch]'")
    for example in examples:
        check_python(example)
