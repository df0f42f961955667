"""Starts are timed one by one, as asked, and a command that does not end as it must is told."""

import ast
import json
import types
from pathlib import Path

import pytest

from benchmarks import start_up
from bert_packed.core.settings import InputError


@pytest.fixture
def processes(monkeypatch):
    """What was started; the clock goes on by 2, 4, 9, ... seconds a process."""
    started, seconds, status = [], [2, 20, 4, 40, 9, 90], {"help": 0, "missing": 2}
    now = [0.0, 0.0]

    def run(command, **_):
        is_help = command[-1] == "--help"
        started.append(command[1:])
        now[0] += seconds[len(started) - 1]
        now[1] += seconds[len(started) - 1] / 4
        said = "why" if is_help else f"no {command[-1].partition('=')[2]}"
        return types.SimpleNamespace(returncode=status["help" if is_help else "missing"], stderr=said)

    monkeypatch.setattr(start_up.subprocess, "run", run)
    monkeypatch.setattr(start_up.time, "perf_counter", lambda: now[0])
    usage = lambda _: types.SimpleNamespace(ru_utime=now[1], ru_stime=now[1])  # noqa: E731
    monkeypatch.setattr(start_up.resource, "getrusage", usage)
    return types.SimpleNamespace(started=started, status=status)


def test_medians_of_help_and_of_a_missing_input(processes, tmp_path):
    target = tmp_path / "start.json"
    start_up.main(start_up.StartConfig(commands="audit", repeats=3, json=str(target)))
    assert json.loads(target.read_text()) == [
        {
            "command": "audit",
            "--help, s": 4,
            "--help, CPU s": 2,
            "missing input, s": 40,
            "missing input, CPU s": 20,
        }
    ]
    asked, missing = processes.started[:2]
    assert asked == ["-m", "bert_packed.audit", "--help"]
    assert [one.partition("=")[0] for one in missing] == [
        "-m",
        "bert_packed.audit",
        "--init_checkpoint",
        "--input_file",
    ]
    assert missing[-1].endswith("/there-is-no-such-file")


@pytest.mark.parametrize(("which", "is_help"), [("help", True), ("missing", False)])
def test_a_command_must_end_as_it_says(processes, which, is_help):
    processes.status[which] = 1
    with pytest.raises(InputError, match=r"export must end with status [02].* Received: 1, (why|no )"):
        start_up.start("export", is_help)


def test_another_mistake_than_a_missing_input_is_none(monkeypatch):
    ended = types.SimpleNamespace(returncode=2, stderr="Unknown command line flag 'checkpoint'")
    monkeypatch.setattr(start_up.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(InputError, match=r"audit must end with status 2, and name what is missing.*Unknown"):
        start_up.start("audit", is_help=False)


def test_unknown_commands_are_refused():
    with pytest.raises(InputError, match=r"`commands` must be of .*Received: x, y\."):
        start_up.StartConfig(commands="y,audit,x")


def test_every_command_of_the_package_is_started():
    tree = ast.parse((Path(__file__).parents[2] / "setup.py").read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    scripts = ast.literal_eval(assigned["SCRIPTS"])
    assert {module for _, module, *_ in start_up.COMMANDS.values()} == set(scripts)
    assert {name: module.rpartition(".")[2] for name, (_, module, *_) in start_up.COMMANDS.items()} == {
        name: name for name in start_up.COMMANDS
    }


@pytest.mark.slow
def test_every_command_tells_of_a_missing_input():
    for name in start_up.COMMANDS:
        start_up.start(name, is_help=False)  # raises, were status or message others'
