"""Steps give the same results from one process, several, or Beam, and are not done twice."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorded_calls import assert_refused

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from data_gen.jobs import runners
from data_gen.jobs.steps import Job, Step
from data_gen.pack_config import PackConfig
from data_gen.pack_tfrecords import main

S = 32
BEAM = [
    pytest.mark.skipif(importlib.util.find_spec("apache_beam") is None, reason="needs the extra `beam`"),
    pytest.mark.filterwarnings("default"),
]
BY_BEAM = {"num_workers": 0, "runner": "DirectRunner"}


def square(number):
    if number < 0:
        raise InputError(f"must be positive. Received: {number}.")
    return {"value": number * number, "pid": os.getpid()}


def make_steps(numbers):
    return [Step(f"square-{number}", square, number) for number in numbers]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_the_order_of_the_steps(tmp_path, num_workers):
    with Job(tmp_path, num_workers) as job:
        results = job.run(make_steps(range(7)), "square")
        assert [result["value"] for result in results] == [n * n for n in range(7)]
        assert (os.getpid() in {result["pid"] for result in results}) == (num_workers == 1)
        again = job.run(make_steps(range(9)), "square")
        assert again[:7] == results and again[8]["value"] == 64


def test_release_is_called_for_every_step(tmp_path):
    released = []
    with Job(tmp_path) as job:
        job.run(make_steps([1, 2]), "square")
        job.run(make_steps([1, 2, 3]), "square", release=lambda step: released.append(step.name))
    assert sorted(released) == ["square-1", "square-2", "square-3"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_mistake_reaches_the_caller(tmp_path, num_workers):
    with (
        pytest.raises(InputError, match=r"must be positive\. Received: -1"),
        Job(tmp_path, num_workers) as job,
    ):
        job.run(make_steps([1, -1, 2]), "square")


def write_late(path):
    Path(f"{path}.begun").touch()
    time.sleep(30)  # long after it should have been killed, on a busy machine too
    Path(path).touch()


def fail_when_begun(path):
    while not Path(f"{path}.begun").exists():
        time.sleep(0.01)
    raise InputError("a mistake")


def test_after_a_mistake_no_worker_goes_on(tmp_path):
    """It would write its step into the folder of the next run."""
    path = str(tmp_path / "late")
    with pytest.raises(InputError, match="a mistake"), Job(tmp_path, 2) as job:
        job.run([Step("late", write_late, path), Step("fail", fail_when_begun, path)], "write")
    assert not Path(path).exists()


ONE_WORKER = """
import os, signal, time
from data_gen.jobs.runners import start_workers
pool = start_workers(1)
pid, handler = pool.submit(os.getpid), pool.submit(signal.getsignal, signal.SIGINT)
print(pid.result(), handler.result() == signal.SIG_IGN, flush=True)
time.sleep(600)
"""


def has_ended(pid):
    try:
        return "(zombie)" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_workers_ignore_interrupts_and_end_with_their_parent():
    with subprocess.Popen([sys.executable, "-c", ONE_WORKER], stdout=subprocess.PIPE, text=True) as parent:
        pid, ignores_interrupts = parent.stdout.readline().split()
        was_alive = not has_ended(pid)
        parent.kill()
    assert (ignores_interrupts, was_alive) == ("True", True)
    deadline = time.monotonic() + 60
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not has_ended(pid):
        os.kill(int(pid), signal.SIGKILL)
        pytest.fail("the worker outlived its parent")


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [runners.choose_num_workers(0, size, 10) for size in (10, 11)] == [1, 3]
    assert [runners.choose_num_workers(0, size) for size in (1000, 2**31)] == [1, 3]
    assert runners.choose_num_workers(2, 1000) == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert runners.choose_num_workers(0, 11, 10) == 64


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"num_workers": 2}) for name in ("pack", "create", "create causal", "pack rows")),
        pytest.param("create", BY_BEAM, marks=BEAM),
        pytest.param("pack rows", BY_BEAM, marks=BEAM),
    ],
)
def test_no_byte_depends_on_processes_and_runner(tmp_path, jobs, name, changes):
    assert jobs[name].run(tmp_path / "out", **changes) == jobs[name].bytes


def test_a_runner_that_is_not_installed(tmp_path, jobs, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flags = {**jobs["pack"].settings, "output_dir": tmp_path / "out", "runner": "FlinkRunner"}
    message = "pip install 'bert_packed[beam]'. Received: FlinkRunner"
    assert_refused(main, PackConfig, message, **{**flags, "num_workers": 0})
    assert_refused(main, PackConfig, "must be 0", **{**flags, "num_workers": 2})
    assert not (tmp_path / "out").exists()


@pytest.fixture
def place():
    """A folder in a file system in memory."""
    storage.make_folder("memory://jobs")
    yield "memory://jobs"
    storage.remove_folder("memory://jobs")


def files_of(manifest):
    parts = manifest, *manifest.get("splits", {}).values()
    return [entry for part in parts for entry in part.get("files", ())]


@pytest.mark.parametrize("name", ["pack", "create", "create causal"])
def test_urls_give_the_same_bytes(jobs, name, place):
    """Inputs, vocabulary and output are URLs."""
    job = jobs[name]
    for path in filter(Path.is_file, job.whole.parent.iterdir()):
        with storage.open_file(f"{place}/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    strings = {key: value for key, value in job.settings.items() if isinstance(value, str)}
    moved = {key: value.replace(str(job.whole.parent), place) for key, value in strings.items()}
    out = f"{place}/{name} out"
    manifest = job.function(job.config(out, **moved))
    assert manifest["inputs"][0]["path"].startswith(f"{place}/a.")
    assert files_of(manifest) == files_of(json.loads(job.bytes["manifest.json"])) != []
    found = {}
    for path in storage.list_names(out):
        with storage.open_file(f"{out}/{path}") as file:
            found[path] = file.read()
    assert found.keys() == job.bytes.keys()
    assert {path for path in found if found[path] != job.bytes[path]} == {"manifest.json"}
