"""The plugin that runs the tests: reports of every file, of crashed processes, and the order to stop."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PASSES = "def test_a(): pass\n\n\ndef test_b(tmp_path): assert tmp_path.exists()\n"
CRASHES = "import os\n\n\ndef test_c(): pass\n\n\ndef test_d(): os._exit(3)\n\n\ndef test_e(): pass\n"
FAILS = "def test_f():\n    print('said')\n    assert 0\n"


@pytest.fixture
def run(tmp_path):
    """Run pytest with the plugin on files of the given texts: its output."""

    def run(*texts, arguments=()):
        for number, text in enumerate(texts):
            (tmp_path / f"test_{number}.py").write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "file_processes", "-v", *arguments, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        environment.pop("PYTEST_ADDOPTS", None)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.stdout

    return run


def outcomes(text):
    return dict(re.findall(r"::(test_\w) (\w+) ", text))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_test_is_reported_also_after_a_crash(run, processes):
    text = run(PASSES, CRASHES, FAILS, arguments=[f"--processes={processes}"])
    assert "2 failed, 4 passed" in text
    failed = {name for name, outcome in outcomes(text).items() if outcome == "FAILED"}
    assert failed == {"test_d", "test_f"} and len(outcomes(text)) == 6
    assert "the process of test_1.py ended in this test, with status 3" in text
    assert "said" in text


def test_in_one_process(run):
    assert "1 failed, 2 passed" in run(PASSES, FAILS, arguments=["--processes=0"])


def test_it_stops_at_the_first_failure(run):
    text = run(FAILS, PASSES, PASSES.replace("test_", "test_x"), arguments=["-x", "--processes=1"])
    assert "1 failed in" in text and "stopping after 1 failures" in text
