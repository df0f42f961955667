"""Steps give the same results from one process, several, or Beam, and are not done twice."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from crash import all_bytes
from unpacked_records import make_features, write_features

from bert_packed.core import storage
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen.jobs import runners
from data_gen.jobs.steps import Job, Step
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.pack_tfrecords import main
from data_gen.text.create_config import CreateConfig
from data_gen.text.create_job import create

S = 32
HAS_BEAM = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None, reason="needs the extra `beam`"
)
BEAM = pytest.param("DirectRunner", marks=[HAS_BEAM, pytest.mark.filterwarnings("default")])


def square(number):
    if number < 0:
        raise InputError(f"must be positive. Received: {number}.")
    return {"value": number * number, "pid": os.getpid()}


def make_steps(numbers):
    return [Step(f"square-{number}", square, number) for number in numbers]


@pytest.mark.parametrize(("runner", "num_workers"), [("local", 1), ("local", 2)])
def test_results_stand_in_the_order_of_the_steps(tmp_path, runner, num_workers):
    with Job(tmp_path, num_workers, runner) as job:
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


def test_workers_leave_interrupts_to_their_parent_and_end_with_it():
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


@pytest.mark.parametrize("num_bytes, expected", [(1000, 1), (2**31, runners.num_cores())])
def test_processes_that_pay(num_bytes, expected):
    assert runners.choose_num_workers(0, num_bytes) == expected
    assert runners.choose_num_workers(3, num_bytes) == 3


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [runners.choose_num_workers(0, size, 10) for size in (10, 11)] == [1, 3]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert runners.choose_num_workers(0, 11, 10) == 64


@pytest.fixture
def packing(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        write_features(tmp_path / f"{name}.tfrecord", make_features(rng.integers(3, S + 1, 300), S))
    settings = {"input_file": f"{tmp_path}/*.tfrecord", "max_seq_length": S, "num_shards": 3}
    pack(PackConfig(output_dir=str(tmp_path / "alone"), num_workers=1, **settings))
    return settings, all_bytes(tmp_path / "alone")


def test_packs_do_not_depend_on_the_number_of_processes(tmp_path, packing):
    settings, expected = packing
    pack(PackConfig(output_dir=str(tmp_path / "three"), num_workers=3, **settings))
    assert all_bytes(tmp_path / "three") == expected


@pytest.mark.parametrize("runner", [BEAM])
def test_packs_do_not_depend_on_the_runner(tmp_path, packing, runner):
    settings, expected = packing
    pack(PackConfig(output_dir=str(tmp_path / "beam"), runner=runner, **settings))
    assert all_bytes(tmp_path / "beam") == expected
    long = write_features(tmp_path / "long.tfrecord", make_features([S + 1], S + 1))
    mistaken = PackConfig(
        **{**settings, "input_file": long, "output_dir": str(tmp_path / "x"), "runner": runner}
    )
    with pytest.raises(InputError, match=r"long\.tfrecord, record 1: a sequence must have at most"):
        pack(mistaken)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("runner", [BEAM])
def test_records_do_not_depend_on_the_runner(tmp_path, runner):
    (tmp_path / "words.txt").write_text("\n".join([*SPECIAL_TOKENS, "one", "two", "three"]))
    (tmp_path / "a.txt").write_text("one two\nthree\n\n" * 30)
    (tmp_path / "b.txt").write_text("three one\ntwo two\n\n" * 30)
    settings = {
        "input_file": f"{tmp_path}/a.txt,{tmp_path}/b.txt",
        "vocab_file": f"{tmp_path}/words.txt",
        "max_seq_length": S,
        "eval_fraction": 0.1,
    }
    create(CreateConfig(output_dir=str(tmp_path / "alone"), num_workers=1, **settings))
    create(CreateConfig(output_dir=str(tmp_path / "beam"), runner=runner, **settings))
    assert all_bytes(tmp_path / "alone") == all_bytes(tmp_path / "beam")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"num_workers": 2}, pytest.param({"runner": "DirectRunner"}, marks=BEAM.marks)]
)
def test_causal_records_and_rows_do_not_depend_on_processes_and_runner(tmp_path, changes):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"one two {name}\nthree\n\n" * 40)
    making = {"objective": "causal_lm", "tokenizer": "byte_bpe", "vocab_size": 260, "max_seq_length": S}
    making |= {"input_file": f"{tmp_path}/a.txt,{tmp_path}/b.txt", "num_shards": 3, "provenance": True}
    rows = {"max_seq_length": S, "split_sequences": True, "num_rows": 4, "provenance": True}
    made = {"alone": {"num_workers": 1}, "others": changes}
    for name, changed in made.items():
        create(CreateConfig(output_dir=f"{tmp_path}/{name}", **making, **changed))
    for name, changed in made.items():  # of the same inputs, whose paths are in the manifest
        input_file = f"{tmp_path}/alone/*.tfrecord"
        pack(PackConfig(input_file=input_file, output_dir=f"{tmp_path}/{name}-rows", **rows, **changed))
    assert all_bytes(tmp_path / "alone") == all_bytes(tmp_path / "others")
    assert all_bytes(tmp_path / "alone-rows") == all_bytes(tmp_path / "others-rows")


def test_a_runner_that_is_not_installed(tmp_path, packing, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings, _ = packing
    flags = {**settings, "output_dir": tmp_path / "out", "runner": "FlinkRunner"}
    argv = ["pack_tfrecords.py", *(f"--{name}={value}" for name, value in flags.items())]
    assert run(main, PackConfig, argv) == 2
    error = capsys.readouterr().err
    assert "pip install 'bert_packed[beam]'. Received: FlinkRunner" in error and error.count("\n") == 1
    assert run(main, PackConfig, [*argv, "--num_workers=2"]) == 2
    assert "`num_workers` must be 0 with --runner=FlinkRunner" in capsys.readouterr().err
    assert not Path(tmp_path / "out").exists()


def test_remote_paths_go_through_tensorflow(packing):
    settings, expected = packing
    folder = Path(settings["input_file"]).parent
    for name in ("a", "b", "c"):
        content = (folder / f"{name}.tfrecord").read_bytes()
        storage.make_folder("ram://in")
        with storage.open_file(f"ram://in/{name}.tfrecord", "wb") as file:
            file.write(content)
    remote = {**settings, "input_file": "ram://in/*.tfrecord", "output_dir": "ram://out", "num_workers": 1}
    manifest = pack(PackConfig(**remote))
    names = {entry["name"] for entry in manifest["files"]}
    assert set(storage.list_names("ram://out")) == {*names, "manifest.json"}
    for name in names:
        with storage.open_file(f"ram://out/{name}") as file:
            assert file.read() == expected[name]
