"""Files and folders that appear whole or not at all, locks, and one line for damaged text and JSON."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import largest_file

from bert_packed.core import storage
from bert_packed.core.settings import InputError


@pytest.fixture
def calls(monkeypatch):
    """Calls to the disk, in order: sizes of files that are flushed, and new names."""
    noted, fsync, replace = [], os.fsync, os.replace

    def note_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        noted.append("folder" if is_folder else f"{os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def note_replace(source, target):
        noted.append("named")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return noted


def test_content_is_on_the_disk_before_its_name(tmp_path, calls):
    (tmp_path / "a").write_text("old")
    with storage.write_whole(tmp_path / "a") as partial:
        Path(partial).write_text("new text")
        assert (tmp_path / "a").read_text() == "old" and partial.endswith(storage.PARTIAL_SUFFIX)
        assert calls == []
    assert calls == ["8 bytes", "named", "folder"]
    assert (tmp_path / "a").read_text() == "new text" and storage.list_names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_nothing(tmp_path, calls, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), storage.write_whole(tmp_path / "a") as partial:
        Path(partial).write_text("half")
        raise error
    assert calls == [] and storage.list_names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_folder_is_on_the_disk_before_its_name(tmp_path, calls):
    for content in ("old", "newer"):
        calls.clear()
        with storage.write_folder(tmp_path / "a") as partial:
            (partial / "inner").mkdir()
            (partial / "inner" / "b").write_text(content)
            assert partial == tmp_path / "a.partial" and calls == []
            if content == "newer":
                assert (tmp_path / "a" / "inner" / "b").read_text() == "old"
        assert sorted(calls) == [f"{len(content)} bytes", "folder", "folder", "folder"]
        assert storage.list_names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "inner" / "b").read_text() == "newer"


HOLD = "from bert_packed.core import storage\nwith storage.lock({!r}, 'in use'): print('held')"


@pytest.mark.parametrize("name", ["folder", "new"])
def test_a_lock_is_held_against_other_processes_and_then_free(tmp_path, name):
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / name)

    def other():
        done = subprocess.run([sys.executable, "-c", HOLD.format(path)], capture_output=True, text=True)
        return (done.stdout or done.stderr).splitlines()[-1]

    with storage.lock(path, "in use"):
        assert other().endswith("InputError: in use")
        with pytest.raises(InputError, match="busy"), storage.lock(path, "busy"):
            pass
    assert other() == "held"
    with storage.lock("gs://bucket/folder", "in use"), storage.lock("gs://bucket/folder", "in use"):
        pass  # an object store has none


def lock(path):
    with storage.lock(path, ""):
        pass


@pytest.mark.parametrize(
    ("act", "names"),
    [(lock, ["link"]), (lock, ["link", "victim"]), (storage.remove_folder, ["link", "victim"])],
)
def test_what_a_link_leads_to_is_not_locked_made_or_removed(tmp_path, act, names):
    """Its content is another program's, and the holder of a lock writes to the file."""
    if "victim" in names:
        (tmp_path / "victim").touch() if act is lock else (tmp_path / "victim").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match=rf"must not be a link\. Received: {tmp_path}/link\."):
        act(tmp_path / "link")
    assert storage.list_names(tmp_path) == names


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{", dict, "must be JSON. Received: Expecting property name .*line 1 column 2"),
        (b"\xff", dict, "must be UTF-8. Received: 'utf-8' codec"),
        (b'{"a": ' + b"[" * 100_000, dict, "must be JSON. Received: brackets nested too deeply."),
        (b'{"a": ' + b"9" * 9_999 + b"}", dict, "must be JSON. Received: Exceeds the limit"),
        (b"[1]", dict, "must hold a JSON object. Received: list."),
        (b"{}", list, "must hold a JSON array. Received: dict."),
        (None, dict, "must be JSON. Received: no such file."),
    ],
)
def test_damaged_json_is_one_line(tmp_path, content, kind, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"a.json {message}") as caught:
        storage.read_json(path, kind)
    assert "\n" not in str(caught.value)


def test_json_and_text_come_back(tmp_path):
    path = tmp_path / "new" / "a.json"
    assert storage.read_json(path, default=None) is None and storage.read_json(path, default={}) == {}
    storage.write_json(path, {"a": [1]})
    assert storage.read_json(path) == {"a": [1]}
    assert path.read_text() == '{\n "a": [\n  1\n ]\n}\n' and storage.list_names(path.parent) == ["a.json"]
    path.write_bytes(b"\xef\xbb\xbf[3]")
    assert storage.read_text(path) == "[3]" and storage.read_json(path, object) == [3]
    with pytest.raises(IsADirectoryError):
        storage.read_json(tmp_path, default=None)


def test_errors_name_their_file_once():
    for error in (OSError(errno.EIO, "bad disk"), PermissionError("refused")):
        with pytest.raises(type(error), match=r"^a\.txt: ") as caught, storage.naming_file("a.txt"):
            raise error
        assert caught.value.errno == error.errno
    named = OSError(errno.EIO, "bad disk", "b.txt")
    for error in (named, OSError("cannot write a.txt")):
        with pytest.raises(OSError) as caught, storage.naming_file("a.txt"):
            raise error
        assert caught.value is error


def write_file(path, content):
    with storage.write_whole(path) as partial, storage.open_file(partial, "wb") as file:
        file.write(content)


def write_in_folder(path, content):
    with storage.write_folder(path) as partial:
        (partial / "inner").write_bytes(content)


@pytest.mark.parametrize("write", [write_file, write_in_folder])
def test_a_disk_that_takes_no_more_names_what_was_to_be_written(tmp_path, write):
    """The system names no file where writing fails; where reading does, another file than this."""
    path = tmp_path / "a"
    with pytest.raises(OSError, match=f"^{path}: .*File too large") as caught, largest_file(100):
        write(path, b"x" * 1000)
    assert caught.value.errno == errno.EFBIG and storage.list_names(tmp_path) == []
    with pytest.raises(OSError, match=r"^bad disk$"), storage.write_whole(path):
        raise OSError("bad disk")


def test_names_kinds_and_times_of_paths(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(b"x" * 3)
    (tmp_path / "folder").mkdir()
    assert storage.list_names(tmp_path) == ["a", "b", "c", "folder"]
    for name, kind in (("a", (True, True)), ("folder", (True, False)), ("d", (False, False))):
        assert (storage.exists(tmp_path / name), storage.is_file(tmp_path / name)) == kind
    os.utime(tmp_path / "a", ns=(5, 1_700_000_000_123_456_789))
    assert storage.size_and_time(tmp_path / "a") == (3, 1_700_000_000_123_456_789)
    assert storage.inode(tmp_path / "a") == (tmp_path / "a").stat().st_ino != storage.inode(tmp_path / "b")


def test_behind_a_url_mistakes_are_those_of_local_files(tmp_path):
    """`file://` goes through `fsspec` as gs:// does."""
    with pytest.raises(FileNotFoundError):
        storage.read_text(f"file://{tmp_path}/none")
    storage.write_text(f"file://{tmp_path}/a", "one")
    storage.write_text(f"file://{tmp_path}/a", "two")  # over the other
    assert storage.read_text(tmp_path / "a") == "two" and storage.list_names(f"file://{tmp_path}") == ["a"]
    storage.make_folder(f"file://{tmp_path}/folder")
    assert storage.list_names(f"file://{tmp_path}") == ["a", "folder"]
    assert storage.is_file(f"file://{tmp_path}/a") and not storage.is_file(f"file://{tmp_path}/folder")
    # A file appears when it is complete, or not at all
    storage.make_folder("memory://files")
    with storage.write_whole("memory://files/a") as partial, storage.open_file(partial, "wb") as file:
        file.write(b"content")
        assert "a" not in storage.list_names("memory://files")
    with pytest.raises(KeyError), storage.write_whole("memory://files/a") as partial:
        with storage.open_file(partial, "wb") as file:
            file.write(b"half")
        raise KeyError
    assert storage.match("memory://files/*") == ["memory://files/a"]
    assert (
        storage.read_text("memory://files/a") == "content"
        and storage.size_and_time("memory://files/a")[0] == 7
    )
    storage.remove_folder("memory://files")
    with pytest.raises(OSError):
        storage.read_text("memory://files/a")


def test_names_with_brackets_are_names(tmp_path):
    """`fsspec` takes them for globs, and would move and remove the files of another folder."""
    for store in ("memory://brackets", f"file://{tmp_path}"):
        for folder in ("a[1]", "a1"):
            storage.make_folder(f"{store}/{folder}/b")
            storage.write_text(f"{store}/{folder}/b/c", folder)
        assert storage.read_text(f"{store}/a[1]/b/c") == "a[1]"
        storage.remove_folder(f"{store}/a[1]")
        assert storage.list_names(store) == ["a1"] and storage.read_text(f"{store}/a1/b/c") == "a1"
        assert not storage.exists(f"{store}/a1/b/c/d")  # below a file


def test_a_url_that_nobody_serves_is_named(monkeypatch):
    with pytest.raises(OSError, match="nosuch://a: "):
        storage.exists("nosuch://a")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match="gs://bucket/a needs another package"):
        storage.read_text("gs://bucket/a")
