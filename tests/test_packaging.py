"""The package that is built has what the checkout has: commands, flagfiles, data files, and what it needs."""

import importlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import setuptools
from test_imports import HALVES, MODULES
from text_files import write_text

from bert_packed import cli
from bert_packed.cli import COMMANDS, main
from bert_packed.core import command_line
from bert_packed.packing.histogram import KNOWN_FOLDER
from bert_packed.runs.pretraining_config import PretrainingConfig
from data_gen.sample_data import QUESTIONS_FILE

ROOT = Path(__file__).resolve().parent.parent
EXTRA = re.compile(r"(?:bert_packed|-e '?\"?\.)\[([a-z,]+)\]")


def read_setup():
    """Arguments of setuptools in `setup.py`: a dict."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(ROOT)  # as every build does
        monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))
        runpy.run_path("setup.py")
    return found


described = pytest.fixture(read_setup, scope="module")


def test_one_command_leads_to_every_script(described, monkeypatch, capsys):
    assert described["entry_points"]["console_scripts"] == ["bert-packed = bert_packed.cli:main"]

    def said(status, *arguments):
        monkeypatch.setattr(sys, "argv", ["/bin/bert-packed", *arguments])
        assert main() == status
        return "".join(capsys.readouterr())

    shown = said(0)
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert said(0, "--version") == f"bert_packed {described['version']}\n"
    assert "must be one of train, create, pack, " in said(2, "pak")
    message = "bert-packed pack: error: `num_shards` must be at least 1"
    assert said(2, "pack", "--num_shards=0").startswith(message)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_its_row(name, monkeypatch, capsys):
    """Help comes from the settings alone; the function of the row gets what the flags say."""
    command = COMMANDS[name]
    assert cli.run_command(name, ["bert-packed-x", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(inspect.getdoc(command.load_config())[:60])
    assert re.search(r"usage: bert-packed-x (INPUT_FILE \.\.\. )?\[--flagfile=FILE\]", shown)
    module, _, function = command.function.partition(":")
    monkeypatch.setattr(importlib.import_module(module), function, lambda config: config)
    monkeypatch.setattr(command_line, "parse", lambda config_class, argv: 7)
    assert cli.run_command(name, ["x"]) == 7


@pytest.mark.parametrize("script", sorted(ROOT.glob("run_*.py")) + sorted((ROOT / "data_gen").glob("*_*.py")))
def test_a_script_runs_its_row(script, monkeypatch):
    """The entry points that google-research/bert has run as files, too."""
    if "run_command(" not in (text := script.read_text()):
        return
    called = []
    monkeypatch.setattr(cli, "run_command", lambda name: called.append(name) or 5)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 5 and f'run_command("{called[0]}")' in text and called[0] in COMMANDS


def test_every_file_that_is_no_code_is_packaged(described):
    folders = {
        name: ROOT / described["package_dir"].get(name, name.replace(".", "/"))
        for name in described["packages"]
    }
    packaged = {
        path.relative_to(ROOT)
        for name, patterns in described["package_data"].items()
        for path in folders[name].rglob("*")
        if any(fnmatch(path.relative_to(folders[name]).as_posix(), pattern) for pattern in patterns)
    }
    there = {
        path.relative_to(ROOT)
        for top in (*HALVES, "configs")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert packaged == there
    opened = {QUESTIONS_FILE, *KNOWN_FOLDER.iterdir(), *command_line.CONFIG_FOLDER.iterdir()}
    assert {path.relative_to(ROOT) for path in opened} == there


def test_every_module_is_packaged(described):
    packages = {path.relative_to(ROOT).parent.as_posix().replace("/", ".") for path in MODULES.values()}
    assert packages - {"."} == set(described["packages"]) - {"bert_packed.configs"}
    assert set(described["py_modules"]) == {path.stem for path in ROOT.glob("run_*.py")}


def test_extras_that_are_named_exist(described):
    pages = [ROOT / ".ci/run", *MODULES.values()]  # those of README and docs: test_documented_commands.py
    named = {
        extra for page in pages for found in EXTRA.findall(page.read_text()) for extra in found.split(",")
    }
    assert {"arrow", "beam", "jax", "test"} <= named <= set(described["extras_require"])


def test_the_page_on_installing_names_every_command_and_extra(described):
    page = (ROOT / "docs/start/installing.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9]+)` \|", page, re.MULTILINE)) == set(described["extras_require"])
    for name, command in COMMANDS.items():
        assert f"| `bert-packed {name}` | {command.about} |" in page


def test_the_package_describes_itself(described):
    assert described["long_description"] == (ROOT / "README.md").read_text()
    assert described["license_files"] == ["LICENSE"] and (ROOT / "LICENSE").exists()
    versions = [line.rpartition(" :: ")[2] for line in described["classifiers"] if "Python :: 3." in line]
    assert versions == ["3.11", "3.12"] and described["python_requires"] == ">=3.11"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions


def test_a_flagfile_is_found_wherever_one_stands(tmp_path, monkeypatch):
    """It is named alone, and as pages name it in a checkout; a file that is there comes first."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo.flags", "configs/demo.flags"):
        config = command_line.parse(PretrainingConfig, ["x", f"--flagfile={name}"])
        assert (config.bert_config_file, config.output_dir) == ("bert-tiny", "runs/demo")
    (tmp_path / "demo.flags").write_text((ROOT / "configs/demo.flags").read_text() + "--output_dir=mine\n")
    config = command_line.parse(PretrainingConfig, ["x", "--flagfile=demo.flags"])
    assert config.output_dir == "mine"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which the wheel of this tree's source archive is installed, its dependencies aside."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # a build writes beside the sources
    tree.mkdir()
    for name in (*HALVES, "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "run_pretraining.py", "run_squad.py"):
        shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    # `python -m build` does the same: what the archive lacks, the wheel lacks
    code = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tar.gz")
    subprocess.run([*pip, "wheel", *alone, "--no-build-isolation", "-w", folder, archive], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", *alone, "--target", folder / "site", wheel], check=True)
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_tree(site):
    """A file that the source archive leaves out, whatever setup.py says of the wheel."""
    files = {path.relative_to(ROOT) for half in HALVES for path in (ROOT / half).rglob("*.*")}
    files = {path for path in files if path.suffix != ".pyc"}
    files |= {Path("bert_packed/configs", path.name) for path in (ROOT / "configs").iterdir()}
    assert len(files) > 200 and not [str(path) for path in files if not (site / path).exists()]


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(site, tmp_path):
    """Its commands go from text to trained steps, with a flagfile and a histogram of the package."""
    text, vocab = write_text(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()

    def call(*command):
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def bert_packed(name, **flags):
        return call(site / "bin/bert-packed", name, *(f"--{key}={flags[key]}" for key in flags))

    code = "import bert_packed as b, data_gen as d, run_squad as r; print(b.__file__, d.__file__, r.__file__)"
    assert all(path.startswith(f"{site}/") for path in call(sys.executable, "-c", code).split())
    sizes = {"max_seq_length": 32, "num_shards": 1}
    bert_packed("create", input_file=text, vocab_file=vocab, output_dir="unpacked", dupe_factor=2, **sizes)
    records = "unpacked/train-*.tfrecord"
    bert_packed("pack", input_file=records, output_dir="packed", provenance=True, **sizes)
    (first,) = (empty / "packed").glob("*.tfrecord")
    assert "unpacked/train-00000-of-00001.tfrecord" in bert_packed("find", packed_file=first)
    assert "2,490" in bert_packed("pack", dry_run=True, histogram="glue_rte", algorithm="lpfhp")
    # The flagfile has what the flags leave open: the model is a BERT-tiny
    files = {"input_file": first, "eval_input_file": "", "unpacked_input_file": "", "max_eval_steps": 0}
    steps = {"num_train_steps": 2, "num_warmup_steps": 1, "train_batch_size": 2, "sample_data": False}
    bert_packed("pretrain", flagfile="demo.flags", output_dir="run", **files, **steps)
    assert "--bert_config_file=bert-tiny" in (empty / "run/resolved.flags").read_text().splitlines()
    assert (empty / "run/checkpoint-2").is_dir()
