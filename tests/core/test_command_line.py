"""Flags from dataclasses: parsing, help, flagfiles, output files, and one line with status 2 for mistakes."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from interrupts import interruptible

from bert_packed.core import command_line
from bert_packed.core.runtime import import_quietly
from bert_packed.core.settings import InputError, check_settings, parse_depth, setting
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.tasks.glue.config import GlueConfig
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.squad.config import SquadConfig
from data_gen import pack_tfrecords
from data_gen.pack_config import PackConfig
from data_gen.text.create_config import CreateConfig


@dataclasses.dataclass(frozen=True)
class Example:
    """What it does."""

    input_file: str = setting("", "where from", changeable=True)
    num_shards: int = setting(8, "number of output files", minimum=1)
    rate: float = setting(0.5, "share", minimum=0)
    algorithm: str = setting("lpfhp", "how to pack", choices=("spfhp", "lpfhp"))
    overwrite: bool = setting(False, "replace what is there")
    depth: int | str = setting("max", "sequences per pack", parse=parse_depth)

    def __post_init__(self):
        check_settings(self)


def run(capsys, *arguments, main=lambda config: None):
    status = command_line.run(main, Example, ["program.py", *arguments])
    return status, capsys.readouterr()


def test_flags_reach_the_config(capsys):
    seen = []
    arguments = ("--input_file=a b", "--num_shards=3", "--rate=1e-3", "--overwrite", "--depth=4")
    status, _ = run(capsys, *arguments, main=seen.append)
    assert status == 0
    assert seen == [Example("a b", 3, 1e-3, "lpfhp", True, 4)]
    run(capsys, "--nooverwrite", "--depth", "max", main=seen.append)
    assert seen[1] == Example()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--num_shards=0", "`num_shards` must be at least 1. Received: 0."),
        ("--num_shards=few", "`num_shards` must be a whole number. Received: 'few'."),
        ("--rate=fast", "`rate` must be a number. Received: 'fast'."),
        ("--overwrite=perhaps", "`overwrite` must be true or false. Received: 'perhaps'."),
        ("--algorithm=nfd", "`algorithm` must be one of spfhp, lpfhp. Received: 'nfd'."),
        ("--depth=0", "must be a whole number of at least 1, or the word max. Received: '0'."),
        ("--depht=3", "Unknown command line flag 'depht'"),
        ("stray", "every argument must be a flag, --name=value. Received: 'stray'."),
        ("--input_file --overwrite", "not begin with --, as a flag does. Received: '--overwrite'."),
        ("--input_file=--rate=2", "`input_file` must not begin with --, as a flag does. Received: '--rate=2"),
        ("--flagfile=/nowhere.flags", "Unable to open flagfile"),
    ],
)
def test_mistakes_are_one_line_and_status_2(capsys, argument, message):
    status, printed = run(capsys, *argument.split())
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("program.py: error: ") and printed.err.count("\n") == 1
    assert message in printed.err


def test_errors_of_main(capsys):
    def run_failing(error):
        return run(capsys, main=mock.Mock(side_effect=error))

    status, printed = run_failing(InputError("two\nlines"))
    assert (status, printed.err) == (2, "program.py: error: two lines\n")
    assert run_failing(OSError(28, "No space left on device", "x"))[0] == 2
    assert run_failing(KeyboardInterrupt())[0] == 130
    with pytest.raises(ZeroDivisionError):  # our own mistake keeps its traceback
        run_failing(ZeroDivisionError())
    assert run(capsys, main=lambda _: 1)[0] == 1


def test_help_groups_settings_and_hides_the_advanced(capsys):
    @dataclasses.dataclass(frozen=True)
    class Grouped:
        """What it does."""

        first: int = setting(1, "one", group="Model")
        second: int = setting(2, "two", group="Data", advanced=True)
        third: int = setting(3, "three", group="Model", advanced=True)
        fourth: int = setting(4, "four", group="Data")
        fifth: str = setting("five", "5", choices=("five", "six"))

    def help_of(flag):
        assert command_line.run(None, Grouped, ["program.py", flag]) == 0
        head, text = capsys.readouterr().out.split("[--name=value ...]")
        assert "What it does." in head
        return [line.strip() for line in text.splitlines() if line]

    first = ["--first (default: 1)", "one"]
    fifth = "--fifth (default: five)", "5 (one of five, six)"  # in the group before it
    fourth = ["--fourth (default: 4)", "four", *fifth]
    hidden = "2 advanced flags are hidden; --helpfull shows them."
    assert help_of("--help") == ["Model:", *first, "Data:", *fourth, hidden]
    second, third = ["--second (default: 2)", "two"], ["--third (default: 3)", "three"]
    assert help_of("--helpfull") == ["Model:", *first, *third, "Data:", *second, *fourth]
    Grouped.help_order = "Data", "Other", "Model"
    assert help_of("--help") == ["Data:", *fourth, "Model:", *first, hidden]


@pytest.mark.parametrize(
    "config_class", [PretrainingConfig, SquadConfig, GlueConfig, NerConfig, CreateConfig, PackConfig]
)
def test_help_fits_a_reader_and_ends_with_the_call(config_class):
    text = command_line.help_text("x", config_class, is_full=False)
    headings = [line for line in text.splitlines() if re.fullmatch(r"\w[\w ]+:", line)]
    assert 4 <= len(headings) <= 10 and headings[-1] == "This call:"
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith(" advanced flags are hidden; --helpfull shows them.")


def test_help_whose_reader_has_stopped_is_no_mistake():
    """`--help | head -1` is such a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, pack_tfrecords.__file__, "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_flagfiles(capsys, tmp_path, monkeypatch):
    seen = []
    flagfile = tmp_path / "run.flags"
    flagfile.write_text("# a comment\n--num_shards=3\n--rate=0.25\n")
    run(capsys, f"--flagfile={flagfile}", "--rate=0.75", main=seen.append)
    assert (seen[0].num_shards, seen[0].rate) == (3, 0.75)
    # A bare name is looked up in configs/ where the working directory has no such file
    monkeypatch.setattr(command_line, "CONFIG_FOLDER", tmp_path)
    run(capsys, "--flagfile=run.flags", main=seen.append)
    run(capsys, "--flagfile", "run.flags", main=seen.append)
    assert seen[1] == seen[2] == Example(num_shards=3, rate=0.25)
    config = Example("x y", 2, 0.125, "spfhp", True, "max")
    flagfile.write_text(command_line.to_flagfile(config))
    assert command_line.parse(Example, ["program", f"--flagfile={flagfile}"]) == config


def test_an_interrupt_that_python_drops_comes_again(capfd):
    class Dropped:
        def __del__(self):
            raise KeyboardInterrupt

    def main(config):
        Dropped()
        time.sleep(30)

    with interruptible():
        assert command_line.run(main, Example, ["program"]) == 130
    assert capfd.readouterr().err == "program: interrupted\n"


def test_a_command_that_was_started_to_ignore_interrupts_does():
    def main(config):
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    with interruptible(False):
        assert command_line.run(main, Example, ["program"]) == 7
    with interruptible():
        assert command_line.run(main, Example, ["program"]) == 130


@dataclasses.dataclass(frozen=True)
class Reporting:
    json: str = setting("", "also write the table here")
    picture: str = setting("", "also draw it here")
    markdown: str = setting("", "also write a page here")


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("{}", "a directory"),
        ("{}/file/x.json", "Not a directory in"),
        ("/proc/none/x.json", "/proc"),
        ("{}/" + 250 * "x", "File name too long in"),
        ("gs://bucket/x.json", "a URL"),
        ("/dev/null", "no file"),
        ("{}/new/", "a directory"),
        ("{}/" + 215 * "x", "File name too long in"),  # while it is half-written
    ],
)
@pytest.mark.parametrize("flag", ["json", "picture", "markdown"])
def test_a_file_that_cannot_be_written_is_named_before_the_work(tmp_path, capsys, flag, path, rule):
    (tmp_path / "file").write_text("content")
    main = mock.Mock()
    assert command_line.run(main, Reporting, ["program.py", f"--{flag}={path.format(tmp_path)}"]) == 2
    assert not main.called
    error = capsys.readouterr().err
    assert error.startswith(f"program.py: error: `{flag}` must be a file to write. Received: ")
    assert rule in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("end", "shown"), [("", ""), ("raise ImportError", "chatter")])
def test_output_of_an_import_is_shown_only_if_it_fails(tmp_path, monkeypatch, capfd, end, shown):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"noisy{len(end)}"
    (tmp_path / f"{name}.py").write_text(f"import os\nos.write(2, b'chatter')\n{end}\n")
    with contextlib.suppress(ImportError):
        assert import_quietly(name).__name__ == name and not end
    os.write(2, b" after")
    assert capfd.readouterr().err == f"{shown} after"
