"""Files that appear whole or not at all: in which order the disk is told, and what is left of a failure."""

import errno
import hashlib
import os
import stat
import types

import pytest

from bert_packed.core import files


@pytest.fixture
def calls(monkeypatch):
    """What the disk is told, in order: how large what is flushed is, and when it gets its name."""
    told, fsync, replace = [], os.fsync, os.replace

    def note_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        told.append("folder" if is_folder else f"{os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def note_replace(source, target):
        told.append("named")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return told


def test_content_is_on_the_disk_before_the_name_and_the_name_at_the_end(tmp_path, calls):
    (tmp_path / "a").write_text("old")
    with files.write_whole(tmp_path / "a") as partial:
        with open(partial, "wb") as file:
            file.write(b"new text")
        assert (tmp_path / "a").read_text() == "old" and partial.endswith(files.PARTIAL_SUFFIX)
        assert calls == []
    assert calls == ["8 bytes", "named", "folder"]
    assert (tmp_path / "a").read_text() == "new text" and files.list_names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [ValueError("mistake"), KeyboardInterrupt()])
def test_of_a_failure_nothing_is_left(tmp_path, calls, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises(type(error)), files.write_whole(tmp_path / "a") as partial:
        with open(partial, "wb") as file:
            file.write(b"half")
        raise error
    assert calls == [] and files.list_names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO, errno.ENOSPC])
def test_a_folder_that_cannot_be_flushed(tmp_path, monkeypatch, number):
    """Some network file systems have no such call; a bad disk is another matter."""

    def fail(_):
        raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fail)
    if number in (errno.EINVAL, errno.ENOTSUP):
        files.flush_folder(tmp_path)
    else:
        with pytest.raises(OSError, match="no"):
            files.flush_folder(tmp_path)


def test_what_a_path_is(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(b"x" * 3)
    (tmp_path / "folder").mkdir()
    assert files.list_names(tmp_path) == ["a", "b", "c", "folder"]
    for name, kind in (("a", (True, True)), ("folder", (True, False)), ("d", (False, False))):
        assert (files.exists(tmp_path / name), files.is_file(tmp_path / name)) == kind
    os.utime(tmp_path / "a", ns=(5, 1_700_000_000_123_456_789))
    assert files.size_and_time(tmp_path / "a") == (3, 1_700_000_000_123_456_789)
    assert files.inode(tmp_path / "a") == (tmp_path / "a").stat().st_ino != files.inode(tmp_path / "b")


def test_a_checksum_is_of_every_byte(tmp_path):
    content = b"a" * files.HASH_BYTES + b"b" * 7
    (tmp_path / "a").write_bytes(content)
    assert files.file_sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_globs_cross_folders_and_odd_names_can_be_printed(tmp_path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "one" / "two" / "x.txt").touch()
    assert files.match(f"{tmp_path}/**/*.txt") == [f"{tmp_path}/one/two/x.txt"]
    assert files.printable(os.fsdecode(b"a\xffb")) == r"a\xffb"


def test_behind_a_url_mistakes_are_those_of_local_files(tmp_path):
    """`file://` goes through TensorFlow as gs:// does."""
    with pytest.raises(FileNotFoundError):
        files.read_text(f"file://{tmp_path}/none")
    files.write_text(f"file://{tmp_path}/a", "one")
    files.write_text(f"file://{tmp_path}/a", "two")  # over the other
    assert files.read_text(tmp_path / "a") == "two" and files.list_names(f"file://{tmp_path}") == ["a"]
    files.make_folder(f"file://{tmp_path}/folder")
    assert files.list_names(f"file://{tmp_path}") == ["a", "folder"]
    assert files.is_file(f"file://{tmp_path}/a") and not files.is_file(f"file://{tmp_path}/folder")


def test_names_of_folders_of_an_object_store_end_as_others_do(monkeypatch):
    store = types.SimpleNamespace(listdir=lambda _: ["b/", "c", "a/"])
    monkeypatch.setattr(files, "_gfile", lambda: store)
    assert files.list_names("gs://bucket/data") == ["a", "b", "c"]
