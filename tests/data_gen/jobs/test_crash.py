"""A job that is killed or fails, wherever that is, goes on by the same command and ends in the same bytes."""

import errno
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from crash import all_bytes, find_workers, finish, kill_after, start
from full_disk import largest_file
from recorded_calls import run

from bert_packed.assembly.record_kinds import BertKind
from bert_packed.core import command_line, storage
from bert_packed.core import runtime as versions
from bert_packed.core.settings import InputError
from bert_packed.records.provenance import read_manifest
from data_gen import pack_steps
from data_gen.jobs.output import INCOMPLETE_NAME, open_output_dir
from data_gen.text.corpus import TextDocuments

BOTH = pytest.mark.parametrize("name", ["pack", "create"])
INPUTS = {"pack": "b.tfrecord", "create": "b.txt"}


def notes(folder):
    """The notes of finished steps, but for that of the plan, which is no step that is counted."""
    return [path for path in folder.glob(f"{INCOMPLETE_NAME}/work/*.done") if path.stem != "plan"]


# How a job ends before its time. Each leaves an unfinished run in the folder


def fail_at(step, error, message=None):
    """An error in one kind of step; of a command it is one line that says how to go on."""

    def stop(job, folder, monkeypatch):
        def fail(work):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(job.home, step, fail)
            if message is None:
                with pytest.raises(type(error)):
                    job.run(folder)
            else:
                check_command(job, folder, patch, message)

    return stop


def fill_the_disk(num_good):
    """A disk that takes this number of files."""

    def stop(job, folder, monkeypatch):
        flush, num_flushed = storage.flush_to_disk, 0

        def fail(path):
            nonlocal num_flushed
            num_flushed += path.endswith(storage.PARTIAL_SUFFIX)
            if num_flushed > num_good:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            flush(path)

        with monkeypatch.context() as patch:
            patch.setattr(storage, "flush_to_disk", fail)
            check_command(job, folder, patch, "No space left on device")
        assert not list(folder.rglob(f"*{storage.PARTIAL_SUFFIX}"))

    return stop


def limit_files(job, folder, monkeypatch):
    """A limit of the system on the size of a file, which runs keep and shards do not."""
    with monkeypatch.context() as patch, largest_file(100_000):
        check_command(job, folder, patch, ".partial: [Errno 27] File too large")


def check_command(job, folder, patch, message):
    patch.setattr(command_line, "_show_log", lambda: None)  # it would stay for other tests
    seen = run(job.function, job.config_class, **{**job.settings, "output_dir": folder})
    assert seen.status == (130 if message == "interrupted" else 2)
    assert message in seen.error and seen.error.count("\n") == 1
    assert f"the same command continues with what is in {folder / INCOMPLETE_NAME}" in seen.error


def kill_a_worker(job, folder, monkeypatch):
    command = [sys.executable, *job.argv(folder, num_workers=2)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not notes(folder):
        time.sleep(0.001)
    os.kill(find_workers(process.pid)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2 and error.count("\n") == 1
    assert "a worker process ended" in error and "the same command continues" in error


EVENTS = {
    "the first files on a full disk": fill_the_disk(8),  # create notes its first step at the eighth
    "later files on a full disk": fill_the_disk(11),
    "shards above the limit of files": limit_files,
    "an interrupt": fail_at("write_shard", KeyboardInterrupt(), "interrupted"),
    "no memory": fail_at("write_shard", MemoryError()),
    "a killed worker": kill_a_worker,
}


@BOTH
@pytest.mark.parametrize(
    "event",
    [pytest.param(event, marks=pytest.mark.slow if event == "a killed worker" else ()) for event in EVENTS],
)
def test_no_finished_step_is_done_again(tmp_path, jobs, name, event, monkeypatch):
    job, out = jobs[name], tmp_path / "out"
    EVENTS[event](job, out, monkeypatch)
    assert [path.name for path in out.iterdir()] == [INCOMPLETE_NAME]
    num_done, calls = len(notes(out)), job.count_steps(monkeypatch)
    assert job.run(out) == job.bytes
    assert job.num_steps - len(calls) == num_done > 0


def test_no_finished_merge_is_done_again(tmp_path, jobs, monkeypatch):
    """A file that is merged into several leaves the disk with the last of them, not with the first."""
    job, calls, fine = jobs["pack on levels"], [], pack_steps.merge_runs

    def fail(work):
        calls.append(fine(work))
        if len(calls) == 3:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pack_steps, "merge_runs", fail)
        with pytest.raises(MemoryError):
            job.run(tmp_path / "out")
    num_done, calls = len(notes(tmp_path / "out")), job.count_steps(monkeypatch)
    assert job.run(tmp_path / "out") == job.bytes == jobs["pack"].bytes
    assert job.num_steps - len(calls) == num_done and calls.count("merge_runs") > 10


def test_room_that_killed_steps_take_is_given_back(tmp_path, jobs, monkeypatch):
    out, stop = tmp_path / "out", EVENTS["no memory"]
    stop(jobs["pack"], out, monkeypatch)
    left = [out / INCOMPLETE_NAME / "packed.x.partial", out / INCOMPLETE_NAME / "work" / "run.x.partial"]
    for path in left:
        path.write_text("half")
    stop(jobs["pack"], out, monkeypatch)
    assert not any(path.exists() for path in left)


def test_a_full_disk_before_the_first_note_leaves_nothing(tmp_path, jobs, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(storage, "flush_to_disk", fail)
    with pytest.raises(OSError, match="No space left"):
        jobs["pack"].run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Kills of the process itself


def continue_and_compare(job, folder, expected, **changes):
    """The same command ends in the expected bytes, unless the run was complete already."""
    is_to_continue = (folder / INCOMPLETE_NAME / "work" / "identity.json").exists()
    if changes.get("overwrite") or read_manifest(folder) is None or is_to_continue:
        assert job.run(folder, **changes) == expected
    else:
        found = {name: data for name, data in all_bytes(folder).items() if INCOMPLETE_NAME not in name}
        assert found == expected


@pytest.mark.parametrize(
    ("name", "overwrite", "stride"),
    [
        ("pack", True, 23),
        ("create", False, 22),
        ("create causal", False, 26),
        ("pack rows", False, 17),
        ("pack on levels", False, 41),
        # These are killed at every state that a kill can leave
        *(
            pytest.param(name, True, 1, marks=pytest.mark.slow)
            for name in ("pack", "pack on levels", "create")
        ),
    ],
)
def test_killed_at_changes_of_names(tmp_path, jobs, name, overwrite, stride):
    """Files appear, move and vanish at these changes."""
    job, fatal_change, num_kills, num_incomplete = jobs[name], 2, 0, 0
    if overwrite:  # with one shard more, all the names are others
        job.run(tmp_path / "earlier", num_shards=4)
    while True:
        folder = tmp_path / f"out-{fatal_change}"
        if overwrite:
            shutil.copytree(tmp_path / "earlier", folder)
        process = start(job.function, job.config(folder, overwrite=overwrite), fatal_change)
        if finish(process) == 0:
            break
        num_kills += 1
        num_incomplete += read_manifest(folder) is None
        continue_and_compare(job, folder, job.bytes, overwrite=overwrite)
        fatal_change += stride
    assert num_kills >= 3 and num_incomplete > 0


@pytest.mark.parametrize(
    ("name", "victims"),
    [
        ("pack", ["process"] * 2),
        *(
            pytest.param(name, ["process", "group", "worker", "process"], marks=pytest.mark.slow)
            for name in ("pack", "create")
        ),
    ],
)
def test_killed_at_random_moments(tmp_path, jobs, name, victims):
    job, durations, num_tries = jobs[name], {}, 0
    for num_workers in {2 if "worker" in victims else 1, 1}:
        began = time.monotonic()
        config = job.config(tmp_path / f"whole-{num_workers}", num_workers=num_workers)
        assert finish(start(job.function, config)) == 0
        durations[num_workers] = time.monotonic() - began
    rng = np.random.default_rng(0)
    while victims:
        folder, num_workers = tmp_path / f"out-{num_tries}", 1 if victims[0] == "process" else 2
        process = start(job.function, job.config(folder, num_workers=num_workers))
        if kill_after(process, rng.uniform(0, durations[num_workers]), victims[0]):
            victims = victims[1:]
        if folder.exists():
            continue_and_compare(job, folder, job.bytes)
        num_tries += 1
        assert num_tries < 80  # else the moments are past the end, and nothing is tested


def test_a_second_run_is_refused_while_the_first_lives(tmp_path, jobs):
    with open_output_dir(tmp_path, False, {}), pytest.raises(InputError, match="written by another run"):
        jobs["pack"].run(tmp_path)


# Other inputs, settings or code


@pytest.mark.parametrize(
    ("name", "what"),
    [("pack", what) for what in ("settings", "inputs", "input manifests", "versions", "code")]
    + [("create", what) for what in ("inputs", "vocabulary")],
)
def test_a_run_of_other_inputs_starts_over_and_says_so(tmp_path, own_jobs, name, what, monkeypatch, caplog):
    job, out, changes = own_jobs[name], tmp_path / "out", {}
    EVENTS["no memory"](job, out, monkeypatch)
    if what == "settings":
        changes = {"random_seed": 5}
    elif what == "inputs":
        path = tmp_path / INPUTS[name]
        path.write_bytes(path.with_stem("a").read_bytes())
    elif what == "input manifests":
        (tmp_path / "manifest.json").write_text('{"vocab_size": 400}')
    elif what == "vocabulary":
        (tmp_path / "words").write_text((tmp_path / "words").read_text() + "\nmore")
    else:
        monkeypatch.setattr(job.module, "code_sha256" if what == "code" else what, lambda: "other")
    calls = job.count_steps(monkeypatch)
    caplog.set_level(logging.WARNING, "data_gen")
    monkeypatch.setattr(logging.getLogger("data_gen"), "propagate", True)
    found = job.run(out, **changes)
    assert f"{out / INCOMPLETE_NAME} is of a run with other {what}: starting over" in caplog.messages
    num_calls = len(calls)
    assert found == job.run(tmp_path / "fresh", **changes)
    assert len(calls) == 2 * num_calls


def test_the_checksum_of_the_code_is_of_every_file(tmp_path, monkeypatch):
    library, generators = tmp_path / "bert_packed", tmp_path / "data_gen"
    for path in (library / "core/runtime.py", library / "packing/plan.py", generators / "pack_job.py"):
        path.parent.mkdir(parents=True)
        path.write_text("one = 1\n")
    own = versions.code_sha256()
    monkeypatch.setattr(versions, "__file__", str(library / "core/runtime.py"))
    found = {own, versions.code_sha256()}
    for path in (library / "packing/plan.py", generators / "pack_job.py"):
        path.write_text("one = 2\n")
        found.add(versions.code_sha256())
    (library / "packing/plan.py").rename(library / "packing/other.py")
    found.add(versions.code_sha256())
    assert len(found) == 5


def replace(path):
    """Put another file of equal size and time in its place."""
    before = path.stat()
    path.with_name("other").write_bytes(path.read_bytes()[::-1])
    os.utime(path.with_name("other"), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path.with_name("other"), path)


@BOTH
@pytest.mark.parametrize("moment", ["before", "while", "before its checksum"])
def test_an_input_that_changes_until_it_is_read_is_named(tmp_path, own_jobs, name, moment, monkeypatch):
    """The note of the run then says something else of it than what was read."""
    job, path = own_jobs[name], tmp_path / INPUTS[name]
    reader, method = (BertKind, "read") if name == "pack" else (TextDocuments, "__iter__")
    read, step = getattr(reader, method), job.steps[0] if name == "pack" else "tokenize"
    do, file_sha256 = getattr(job.home, step), storage.file_sha256

    def summing(source):
        if str(source) == str(path):  # the manifest would vouch for what was not read
            replace(path)
        return file_sha256(source)

    def reading(self, *arguments):
        yield from read(self, *arguments)
        if str(path) in (*arguments, *getattr(self, "paths", ())):
            replace(path)

    def working(work):
        if moment == "before":
            path.write_bytes(path.read_bytes()[:-9])
        return do(work)

    monkeypatch.setattr(job.home, step, working)
    if moment == "while":
        monkeypatch.setattr(reader, method, reading)
    elif moment == "before its checksum":
        monkeypatch.setattr(storage, "file_sha256", summing)
    with pytest.raises(InputError, match=rf"/{path.name} must stay as it is while it is read"):
        job.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@BOTH
def test_the_checksum_of_an_input_is_of_what_was_read(tmp_path, own_jobs, name, monkeypatch):
    """It holds even if the file changes later, by stealth, and the run continues."""
    job, path = own_jobs[name], tmp_path / INPUTS[name]
    before, content = path.stat(), path.read_bytes()
    EVENTS["no memory"](job, tmp_path / "out", monkeypatch)
    half = len(content) // 2  # every start finds the kind of the records in the first one
    path.write_bytes(content[:half] + content[half:][::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    manifest = job.function(job.config(tmp_path / "out"))
    assert manifest["inputs"][1]["path"] == str(path)
    assert manifest["inputs"][1]["sha256"] == hashlib.sha256(content).hexdigest()


# What is on the disk when


@BOTH
def test_a_note_is_written_after_its_files_are_on_the_disk(tmp_path, jobs, name, monkeypatch):
    """Files before their names, names before the note, and all names before that of the manifest."""
    events = []
    flush, rename = os.fsync, os.replace

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(("folder" if os.path.isdir(path) else "file", path))
        flush(descriptor)

    def record_rename(source, target):
        events.append(("rename", os.path.realpath(source), os.path.realpath(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    out = tmp_path / "out"
    found = jobs[name].run(out)
    on_disk, named, waiting = set(), set(), set()
    for kind, path, *target in events:
        if kind == "file":
            on_disk.add(path)
        elif kind == "folder":
            waiting = {name for name in waiting if os.path.dirname(name) != path}
        else:
            (target,) = target
            if path.endswith(storage.PARTIAL_SUFFIX):
                assert path in on_disk
            if target.endswith((".done", "manifest.json")):
                assert not waiting, target
            waiting.add(target)
            named.add(target)
    assert not waiting
    work = out / INCOMPLETE_NAME / "work"
    columns = ("token_ids", "sentence_offsets", "document_offsets", "train_documents.npy")
    files = {"create": [f"corpus/{column}" for column in columns], "pack": ["run-00000-00000.run"]}[name]
    assert {str(out / path) for path in found} | {str(work / path) for path in files} <= named
