"""Every command of README and docs is one of its program's, and those that are quick run, page by page."""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import re
import runpy
import shutil
import sys

import pytest
from documented_commands import PAGES, ROOT, SPAN_START, WHOLE_PAGE, begins_with, blocks, commands, spans
from test_packaging import read_setup
from uncompiled import run_uncompiled

import bert_packed  # noqa: F401  examples name it
from bert_packed.cli import COMMANDS, main
from bert_packed.core import command_line
from bert_packed.core.settings import InputError

VARIABLES = {"KERAS_BACKEND", "TF_CONFIG", "JAX_PLATFORMS", "XLA_FLAGS", "BEAM_OPTIONS", "BLEURT_TINY"}
# Commands open these files to read their settings: a flagfile that `train` writes, and data of the reader's
WRITTEN = {"my/flags/pretrain.flags": "--input_file=my/packed/train/*.tfrecord\n"}
WRITTEN |= dict.fromkeys(("train-v1.1.json", "dev-v1.1.json", "predictions.json", "train.csv", "dev.csv"), "")
WRITTEN |= dict.fromkeys(("pairs.jsonl", "sts.jsonl", "STS-B/train.tsv", "STS-B/dev.tsv"), "")
WRITTEN |= dict.fromkeys(("conll/train.txt", "conll/valid.txt"), "")
# Others' programs begin with these words: the words that are left are theirs
OF_OTHERS = ("hf download", "zip -j", "pip download", "pip uninstall", "pip wheel")

BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")
NUM_DEVICES = 8  # under JAX, where a batch is divided among them, and packs of four rows are audited
BATCH_SIZE, AUDITED_PACKS = (4, 1) if BACKEND == "tensorflow" else (NUM_DEVICES, 8)
# A command has these settings lowered where a page has more, or leaves the choice to the data
LOWERED = {
    "train": {"max_seq_length": 256, "num_train_epochs": 1},
    "create": {"num_workers": 1},
    "pack": {"num_workers": 1},
    "pretrain": {"num_train_steps": 4, "num_warmup_steps": 1}
    | dict.fromkeys(("train_batch_size", "micro_batch_size", "eval_batch_size"), BATCH_SIZE),
    "squad": {"num_train_epochs": 0.1, "train_batch_size": 2},
    "classify": {"num_train_epochs": 1, "train_batch_size": 2},
    "glue": {"num_train_epochs": 1, "train_batch_size": 4},
    "ner": {"num_train_epochs": 1, "train_batch_size": 4},
    "embed": {"num_train_epochs": 1, "train_batch_size": 16},
    "audit": {"num_packs": AUDITED_PACKS},
}
SMALL = {"": "bert-tiny", "bert-mini": "bert-tiny", "bert-base": "bert-tiny"}
# A page shows these lines and its commands print them
PRINTED_LINES = {
    "README.md": ["neighbors: change of hidden_states 0 0 pass", "the model is in my/model"],
    "docs/guides/other_programs.md": ["largest change in them 0.0"],
}
# These are programs of others, networks and tests; CI installs as the pages say
NOT_RUN = re.compile(r"(?:\w+=\S+ )*(?:pip|hf|python -m pytest) ")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder, but for flagfiles that commands write."""
    for name, text in WRITTEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runnable(page, folder="."):
    """The commands and examples of a page that are run under this backend: kind, and words or text."""
    for block in blocks(PAGES[page]):
        if block.kind == "python" and BACKEND == "tensorflow" and block.is_run(block.text):
            yield "python", block.text
        for command in commands(block.text, folder) if block.kind == "shell" else ():
            backend = command.variables.get("KERAS_BACKEND", "tensorflow")
            if backend == BACKEND and block.is_run(str(command)) and not NOT_RUN.match(str(command)):
                yield "shell", list(command.words)


def settings_of(words):
    """The settings class of the program of a command, and its arguments with the program's name."""
    if words[0] == "bert-packed":
        return COMMANDS[words[1]].load_config(), words[1:]
    module, arguments, found = words[2], words[2:], []
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(SystemExit):
        monkeypatch.setattr(command_line, "run", lambda main, settings: found.append(settings))
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
            named = re.fullmatch(r"(?:\.|dist/bert_packed-.*\.whl)\[([a-z,]+)\]", word)
            assert not named or set(named[1].split(",")) <= extras, line
            known = r"-e|\.|--[a-z-]+(=\S+)?|[a-z][a-z0-9-]*(\[\w+\])?(==[\d.]+)?"
            assert named or re.fullmatch(known, word), line
    else:
        assert line.startswith(OF_OTHERS), line
    return None


def understand_part(words, extras):
    """Check words as `understand` does, where settings that must be given are left out."""
    added = []
    while True:
        try:
            return understand([*words, *added], extras)
        except InputError as error:
            flag = f"--{re.match(r'`([a-z_0-9]+)` must be', str(error))[1]}=x"
            if flag in added:
                return None
            assert re.search("must be given|Received: nothing", str(error)), error
            added.append(flag)


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
def test_commands_are_understood(page, folder):
    extras = set(read_setup()["extras_require"])
    for block in blocks(PAGES[page]):
        for command in commands(block.text, folder) if block.kind == "shell" else ():
            assert command.variables.keys() <= VARIABLES
            assert command.variables.get("KERAS_BACKEND", "jax") in ("jax", "tensorflow")
            json.loads(command.variables.get("TF_CONFIG", "{}"))
            understand(command.words, extras)
        # A command that is not read as one would be left out without a word
        unread = [line for line in block.text.splitlines() if SPAN_START.match(line.removeprefix("$ "))]
        assert block.kind == "shell" or not [one for one in unread if ": error:" not in one]
    for span in spans(PAGES[page]):
        for command in commands(span, folder):
            understand_part([word for word in command.words if word != "..."], extras)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "import" in text])
def test_examples_in_python_are_understood(page):
    examples = [block.text for block in blocks(PAGES[page]) if block.kind == "python"]
    if "bert_packed.torch" in "".join(examples):
        pytest.importorskip("torch", reason="pip install -e '.[torch]'")
    for example in examples:
        check_python(example)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A function from a page to the folder in which its commands have run, and all that they said."""
    for package in ("apache_beam", "datasets", "keras_hub", "sentence_transformers", "transformers"):
        pytest.importorskip(package, reason="what .ci/run installs")
    from documented_files import make_documents, write_files

    from bert_packed.runs import interleaved_timing
    from bert_packed.text_to_model import steps
    from bert_packed.training import backend
    from data_gen import sample_data
    from data_gen.text import create_job

    if BACKEND == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    given = tmp_path_factory.mktemp("given")
    write_files(given)

    @functools.cache
    def finish(page):
        folder = tmp_path_factory.mktemp("page") / "here"
        shutil.copytree(given, folder)
        given_by_others = begins_with(PAGES[page]) if BACKEND == "tensorflow" else {}
        for path, (other, there) in given_by_others.items():
            shutil.copytree(finish(other)[0] / there, folder / path, dirs_exist_ok=True)
        said = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(said):
            names = {}
            for kind, text in runnable(page, folder):
                if kind == "shell":
                    run_command(text)
                else:
                    with run_uncompiled():
                        exec(compile(text, "example", "exec"), names)
        return folder, said.getvalue()

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (create_job, sample_data):  # in the place of what all of Python's modules say
            monkeypatch.setattr(module, "read_sample_documents", lambda: iter(make_documents()))
        # `train` compiles no step to see whether it fits
        monkeypatch.setattr(backend, "device_memory_bytes", lambda: None)
        # One timed step of each form of the data is enough of a table that nobody reads
        monkeypatch.setattr(interleaved_timing.compare, "__defaults__", (1,))
        few = functools.partial(steps.AuditConfig, num_packs=AUDITED_PACKS)
        monkeypatch.setattr(steps, "AuditConfig", few)
        yield finish


def run_command(words):
    """Run a command in this process, with the settings of `LOWERED` and `SMALL`; its status must be 0."""
    if words[:2] == ["python", "-c"]:
        exec(words[2], {})
        return
    is_ours = words[0] == "bert-packed"
    settings, arguments = settings_of(words)
    config = command_line.parse(settings, arguments)
    lowered = [
        f"--{name}={most}"
        for name, most in LOWERED.get(arguments[0], {}).items()
        if getattr(config, name) > most or (name == "num_train_epochs" and not getattr(config, name))
    ]
    size = getattr(config, "bert_config_file", None)
    if size in SMALL and (size or not config.init_checkpoint):
        lowered.append(f"--bert_config_file={SMALL[size]}")
    compiled = contextlib.nullcontext() if getattr(config, "compile_only", "") else run_uncompiled()
    with pytest.MonkeyPatch.context() as monkeypatch, compiled:
        monkeypatch.setattr(sys, "argv", [*(words[:1] if is_ours else ()), *arguments, *lowered])
        if is_ours:
            status = main()
        else:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / f"{words[2].replace('.', '/')}.py"), run_name="__main__")
            status = ended.value.code
    assert not status, f"status {status} of {' '.join([*words, *lowered])}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as for a user
@pytest.mark.parametrize(
    "page", [name for name, text in PAGES.items() if any(one.kind for one in blocks(text))]
)
def test_commands_and_examples_run(page, finished):
    _, said = finished(page)
    for line in PRINTED_LINES.get(page, ()) if BACKEND == "tensorflow" else ():
        shown, text = (" ".join(one.split()) for one in (PAGES[page], said))
        assert line in shown and line in text


@pytest.mark.parametrize("page", PAGES)
def test_marks_are_of_commands_that_are_there(page, folder):
    """A mark before no block, or that names no command of it, leaves nothing out."""
    marked = [block for block in blocks(PAGES[page]) if block.not_run]
    assert WHOLE_PAGE.search(PAGES[page]) or len(marked) == PAGES[page].count("<!-- not run")
    for block in marked:
        lines = [*map(str, commands(block.text, folder))] if block.kind == "shell" else [block.text]
        assert all(any(word in line for line in lines) for word in block.not_run)
    assert all(other in PAGES for other, _ in begins_with(PAGES[page]).values())
