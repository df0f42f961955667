"""A run that lacks disk, memory or a worker goes on later; with other inputs or code, it starts again."""

import errno
import hashlib
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from crash import all_bytes, find_workers
from unpacked_records import make_features, write_features

from bert_packed.assembly.bert_packs import BertKind
from bert_packed.core import command_line, storage
from bert_packed.core import runtime as versions
from bert_packed.core.settings import InputError
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen import pack_job, pack_steps
from data_gen.jobs.output import INCOMPLETE_NAME
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text import create_job, create_steps
from data_gen.text.corpus import TextDocuments
from data_gen.text.create_config import CreateConfig
from data_gen.text.create_job import create

S = 32
ROOT = Path(pack_job.__file__).parent
COMMANDS = {
    "pack": (ROOT / "pack_tfrecords.py", pack, PackConfig),
    "create": (ROOT / "create_pretraining_data.py", create, CreateConfig),
}
STEPS = {
    "pack": ((pack_job,), pack_steps, ("read_file", "sort_run", "measure_part", "write_shard")),
    "create": ((create_job,), create_steps, ("train_vocabulary", "tokenize", "join", "write_shard")),
}


@pytest.fixture
def settings(tmp_path):
    """Dict from command to its settings, for inputs of four files."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(50)]
    for name in "abcd":
        write_features(tmp_path / f"{name}.tfrecord", make_features(rng.integers(3, S + 1, 500), S, 7))
        documents = [[" ".join(rng.choice(words, 9)) for _ in range(8)] for _ in range(20)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in documents))
    (tmp_path / "words").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    common = {"max_seq_length": S, "num_workers": 1, "num_shards": 3, "provenance": True}
    text = f"{tmp_path}/[ab].txt:1.25,{tmp_path}/[cd].txt"
    return {
        "pack": {"input_file": f"{tmp_path}/?.tfrecord", **common},
        "create": {"input_file": text, "vocab_file": f"{tmp_path}/words", **common},
    }


def arguments(name, folder, settings):
    flags = {**settings, "output_dir": folder}
    return [str(COMMANDS[name][0]), *(f"--{key}={value}" for key, value in flags.items())]


def complete(name, folder, settings):
    _, function, config_class = COMMANDS[name]
    function(config_class(output_dir=str(folder), **settings))
    return all_bytes(folder)


def user_of(name, function):
    """The module of a command that calls a function of its steps."""
    (user,) = (module for module in STEPS[name][0] if hasattr(module, function))
    return user


def count_steps(name, monkeypatch):
    """List that grows with every step of a command that is done in this process."""
    calls = []
    _, home, functions = STEPS[name]

    def counted(step):
        def count(work):
            calls.append(step.__name__)
            return step(work)

        return count

    for function in functions:
        monkeypatch.setattr(user_of(name, function), function, counted(getattr(home, function)))
    return calls


def notes(folder):
    return list(folder.glob(f"{INCOMPLETE_NAME}/work/*.done"))


def start_command(name, folder, settings):
    command = [sys.executable, *arguments(name, folder, settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_one_line(process, *messages):
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2, error
    assert all(message in error for message in messages) and error.count("\n") == 1, error
    return error


def continue_and_count(name, folder, settings, monkeypatch):
    """Continue a run in this process; checks that no finished step is done again, and returns the bytes."""
    assert_kept(folder)
    num_done = len([path for path in notes(folder) if path.stem != "plan"])  # which is not counted
    calls = count_steps(name, monkeypatch)
    found = complete(name, folder, settings)
    fresh = count_steps(name, monkeypatch)
    complete(name, folder.with_name("fresh"), settings)
    assert len(fresh) - len(calls) == num_done > 0
    return found


def assert_kept(folder):
    assert [path.name for path in folder.iterdir()] == [INCOMPLETE_NAME]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack", "create"])
def test_a_killed_worker_is_one_line_and_the_same_command_continues(tmp_path, settings, name, monkeypatch):
    settings, out = settings[name], tmp_path / "out"
    process = start_command(name, out, {**settings, "num_workers": 2})
    while process.poll() is None and not notes(out):
        time.sleep(0.001)
    os.kill(find_workers(process.pid)[0], signal.SIGKILL)
    check_one_line(process, "a worker process ended", "the same command continues")
    assert continue_and_count(name, out, settings, monkeypatch) == complete(
        name, tmp_path / "whole", settings
    )


def test_a_write_that_the_system_refuses_is_one_line_and_the_same_command_continues(
    tmp_path, settings, monkeypatch
):
    """A limit on the size of a file, which runs keep and the one large shard does not."""
    settings, out = {**settings["pack"], "num_shards": 1}, tmp_path / "out"
    process = start_command("pack", out, settings)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    error = check_one_line(process, "File too large", "the same command continues")
    assert error.count("packed-00000-of-00001.tfrecord") == 1  # TensorFlow's message names it too
    assert continue_and_count("pack", out, settings, monkeypatch) == complete(
        "pack", tmp_path / "whole", settings
    )


@pytest.mark.parametrize("name", ["pack", "create"])
@pytest.mark.parametrize("num_good", [8, 11])  # create notes its first step at the eighth
def test_a_full_disk_is_one_line_and_the_same_command_continues(
    tmp_path, settings, name, num_good, monkeypatch, capsys
):
    settings, out = settings[name], tmp_path / "out"
    flush, num_flushed = storage.flush_to_disk, 0

    def fail(path):
        nonlocal num_flushed
        num_flushed += path.endswith(storage.PARTIAL_SUFFIX)
        if num_flushed > num_good:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        flush(path)

    monkeypatch.setattr(storage, "flush_to_disk", fail)
    monkeypatch.setattr(command_line, "_show_log", lambda: None)  # it would stay for other tests
    main = COMMANDS[name][1]
    assert command_line.run(main, COMMANDS[name][2], arguments(name, out, settings)) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1
    assert f"the same command continues with what is in {out / INCOMPLETE_NAME}" in error
    monkeypatch.undo()
    assert not list(out.rglob(f"*{storage.PARTIAL_SUFFIX}"))
    assert continue_and_count(name, out, settings, monkeypatch) == complete(
        name, tmp_path / "whole", settings
    )


@pytest.mark.parametrize("name", ["pack", "create"])
def test_ctrl_c_keeps_what_is_done_and_the_same_command_continues(
    tmp_path, settings, name, monkeypatch, capsys
):
    settings, out = settings[name], tmp_path / "out"

    def interrupt(work):
        raise KeyboardInterrupt

    monkeypatch.setattr(user_of(name, "write_shard"), "write_shard", interrupt)
    monkeypatch.setattr(command_line, "_show_log", lambda: None)
    _, main, config_class = COMMANDS[name]
    assert command_line.run(main, config_class, arguments(name, out, settings)) == 130
    assert capsys.readouterr().err.endswith(
        f": interrupted; the same command continues with what is in {out / INCOMPLETE_NAME}\n"
    )
    monkeypatch.undo()
    assert continue_and_count(name, out, settings, monkeypatch) == complete(
        name, tmp_path / "whole", settings
    )


def test_a_full_disk_before_the_first_note_leaves_nothing(tmp_path, settings, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(storage, "flush_to_disk", fail)
    with pytest.raises(OSError, match="No space left"):
        complete("pack", tmp_path / "out", settings["pack"])
    assert not (tmp_path / "out").exists()


def fail_at(name, function, monkeypatch, folder, settings):
    """Leave a run whose step `function` failed for want of memory."""

    def fail(work):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(user_of(name, function), function, fail)
        with pytest.raises(MemoryError):
            complete(name, folder, settings)
    assert_kept(folder)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("pack", what) for what in ("settings", "inputs", "input manifests", "code")),
        *(("create", what) for what in ("settings", "inputs", "vocabulary", "code")),
    ],
)
def test_a_run_of_other_things_starts_over_and_says_so(tmp_path, settings, name, what, monkeypatch, caplog):
    settings, out = settings[name], tmp_path / "out"
    fail_at(name, "write_shard", monkeypatch, out, settings)
    if what == "settings":
        settings = {**settings, "random_seed": 5}
    elif what == "inputs":
        path = tmp_path / ("a.tfrecord" if name == "pack" else "a.txt")
        path.write_bytes((tmp_path / path.name.replace("a", "b", 1)).read_bytes())
    elif what == "input manifests":
        (tmp_path / "manifest.json").write_text('{"vocab_size": 400}')
    elif what == "vocabulary":
        (tmp_path / "words").write_text((tmp_path / "words").read_text() + "\nmore")
    else:
        monkeypatch.setattr(user_of(name, "code_sha256"), "code_sha256", lambda: "other")
    calls = count_steps(name, monkeypatch)
    caplog.set_level(logging.WARNING, "data_gen")
    monkeypatch.setattr(logging.getLogger("data_gen"), "propagate", True)
    found = complete(name, out, settings)
    assert f"{out / INCOMPLETE_NAME} is of a run with other {what}: starting over" in caplog.messages
    num_calls = len(calls)
    assert found == complete(name, tmp_path / "whole", settings)
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


def touch(path):
    """Change a file's content to as many other bytes."""
    content = path.read_bytes()
    path.write_bytes(content[::-1])


def replace(path):
    """Put another file of equal size and time in its place."""
    before = path.stat()
    path.with_name("other").write_bytes(path.read_bytes()[::-1])
    os.utime(path.with_name("other"), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path.with_name("other"), path)


@pytest.mark.parametrize("change", [touch, replace])
@pytest.mark.parametrize("name", ["pack", "create"])
def test_an_input_that_changes_while_it_is_read_is_named(tmp_path, settings, name, change, monkeypatch):
    path = tmp_path / ("b.tfrecord" if name == "pack" else "b.txt")
    reader, method = (BertKind, "read") if name == "pack" else (TextDocuments, "__iter__")
    read = getattr(reader, method)

    def changing(self, *arguments):
        yield from read(self, *arguments)
        if str(path) in (*arguments, *getattr(self, "paths", ())):
            change(path)

    monkeypatch.setattr(reader, method, changing)
    with pytest.raises(InputError, match=rf"/{path.name} must stay as it is while it is read\. Received: "):
        complete(name, tmp_path / "out", settings[name])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pack", "create"])
def test_an_input_that_changes_before_it_is_read_is_named(tmp_path, settings, name, monkeypatch):
    """Its content is then not what the note of the run says."""
    path = tmp_path / ("b.tfrecord" if name == "pack" else "b.txt")
    _, home, functions = STEPS[name]
    function = functions[0] if name == "pack" else "tokenize"
    step = getattr(home, function)

    def changing(work):
        if path.exists():
            path.write_bytes(path.read_bytes()[:-9])
        return step(work)

    monkeypatch.setattr(user_of(name, function), function, changing)
    with pytest.raises(InputError, match=rf"/{path.name} must stay as it is while it is read"):
        complete(name, tmp_path / "out", settings[name])


@pytest.mark.parametrize("name", ["pack", "create"])
def test_the_checksum_of_an_input_is_of_what_was_read(tmp_path, settings, name, monkeypatch):
    """Even where it changes later, by stealth, and the run continues."""
    path = tmp_path / ("b.tfrecord" if name == "pack" else "b.txt")
    before, content = path.stat(), path.read_bytes()
    fail_at(name, "write_shard", monkeypatch, tmp_path / "out", settings[name])
    half = len(content) // 2  # every start finds the kind of the records in the first one
    path.write_bytes(content[:half] + content[half:][::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    _, function, config_class = COMMANDS[name]
    manifest = function(config_class(output_dir=str(tmp_path / "out"), **settings[name]))
    assert manifest["inputs"][1]["path"] == str(path)
    assert manifest["inputs"][1]["sha256"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", ["pack", "create"])
def test_a_note_is_written_after_what_it_tells_of_is_on_the_disk(tmp_path, settings, name, monkeypatch):
    """Files before their names, names before the note, and all names before that of the manifest."""
    events = []
    flush, rename = os.fsync, os.replace

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(("folder" if os.path.isdir(path) else "file", path))
        flush(descriptor)

    def replace(source, target):
        events.append(("rename", os.path.realpath(source), os.path.realpath(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    out = tmp_path / "out"
    found = complete(name, out, settings[name])
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
    written = {str(out / path) for path in found}
    work = out / INCOMPLETE_NAME / "work"
    if name == "create":
        columns = ("token_ids", "sentence_offsets", "document_offsets", "train_documents.npy")
        written |= {str(work / "corpus" / column) for column in columns}
    else:
        written |= {str(work / f"run-0000{index}-00000.run") for index in range(4)}
    assert written <= named


def test_partial_files_of_two_machines_never_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with storage.write_whole(tmp_path / "a") as one, storage.write_whole(tmp_path / "a") as other:
        assert one != other
        for partial in (one, other):
            Path(partial).write_text(partial)
    assert (tmp_path / "a").read_text() == one


def test_room_that_killed_steps_take_is_given_back(tmp_path, settings, monkeypatch):
    out = tmp_path / "out"
    fail_at("pack", "write_shard", monkeypatch, out, settings["pack"])
    left = [out / INCOMPLETE_NAME / "packed.x.partial", out / INCOMPLETE_NAME / "work" / "run.x.partial"]
    for path in left:
        path.write_text("half")
    fail_at("pack", "write_shard", monkeypatch, out, settings["pack"])
    assert not any(path.exists() for path in left)
