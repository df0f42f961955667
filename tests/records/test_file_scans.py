"""Scans that are kept: the same as a new reading's, of files that are as they were, and of no others."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import write_data

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records import inputs
from bert_packed.records.inputs import read_checksums, read_scans, scan_unchanged, stamp_of, write_scans
from bert_packed.records.tfrecords import scan_file


@pytest.fixture
def files(tmp_path):
    (tmp_path / "data").mkdir()
    return write_data(tmp_path / "data", num_packs=(9, 1, 300))


@pytest.fixture
def store(tmp_path, files):
    path = str(tmp_path / ".scans.npz")
    write_scans(path, {file: scan_unchanged(file) for file in files})
    return path


def test_kept_scans_equal_new_ones(store, files):
    kept = read_scans(store, [files[2], files[0]])
    assert list(kept) == [files[2], files[0]]
    for path, (scan, stamp) in kept.items():
        new = scan_file(path)
        assert (scan.sha256, scan.num_records) == (new.sha256, new.num_records)
        assert scan.offsets.dtype == np.int64 and scan.offsets.tolist() == new.offsets.tolist()
        assert stamp == stamp_of(path)
    assert read_checksums(store) == {path: scan_file(path).sha256 for path in files}
    assert os.listdir(os.path.dirname(store)).count(".scans.npz") == 1


def flip(path):
    """Change one byte to another."""
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(path).write_bytes(content)


def change_back(path, of=None):
    """Set the time of the last change back, as `cp -p` and `touch -r` do."""
    before = os.stat(of or path)
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns


def replace(path):
    """Replace a file by another one of the same size, which was there before."""
    other = shutil.copy2(path, f"{path}.other")
    change_back(other, of=path)
    os.replace(other, path)


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [flip, change_back, replace, grow])
def test_a_file_that_changed_or_is_new_is_noticed(store, files, tmp_path, change):
    size = os.path.getsize(files[1])
    change(files[1])
    assert (os.path.getsize(files[1]) == size) == (change is not grow)
    new = shutil.copy(files[0], tmp_path / "new.tfrecord")
    assert list(read_scans(store, [*files, str(new)])) == [files[0], files[2]]


def test_a_damaged_store_gives_nothing_wrong(store, files):
    """The archive's own index is last; no checksum covers it. Each byte of it, and some of the others."""
    content = Path(store).read_bytes()
    expected = {path: scan_file(path) for path in files}
    numbers_found = set()
    for place in (*range(0, len(content) - 180, 37), *range(len(content) - 180, len(content))):
        for mistake in (0x01, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= mistake
            Path(store).write_bytes(damaged)
            found = read_scans(store, files)
            numbers_found.add(len(found))
            for path, (scan, _) in found.items():
                assert scan.sha256 == expected[path].sha256
                assert scan.offsets.tolist() == expected[path].offsets.tolist()
    assert numbers_found == {0, len(files)}


@pytest.mark.parametrize(
    "change",
    [
        os.remove,
        lambda store: os.truncate(store, os.path.getsize(store) - 30),
        lambda store: Path(store).write_bytes(b"PK"),
        lambda store: Path(store).write_bytes(b""),
        lambda store: (os.remove(store), os.mkdir(store)),
        lambda store: (os.remove(store), os.symlink(store, store)),
    ],
    ids=["missing", "cut", "PK", "empty", "folder", "loop"],
)
def test_what_is_no_store_holds_nothing(store, files, change):
    change(store)
    assert read_scans(store, files) == {} and read_checksums(store) == {}


def test_a_store_of_another_version_holds_nothing(store, files, monkeypatch):
    monkeypatch.setattr(inputs, "SCANS_FORMAT", 2)
    assert read_scans(store, files) == {}


def test_a_killed_write_leaves_the_store_as_it_was(store, files, monkeypatch):
    before = Path(store).read_bytes()

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(inputs.np, "savez", killed)
    with pytest.raises(KeyboardInterrupt):
        write_scans(store, {files[0]: scan_unchanged(files[0])})
    assert Path(store).read_bytes() == before


def test_a_file_that_changes_while_it_is_read_is_refused(files, monkeypatch):
    def scan(path):
        found = scan_file(path)
        flip(path)
        return found

    monkeypatch.setattr(inputs, "scan_file", scan)
    with pytest.raises(InputError, match=r"packed-0\.tfrecord must stay as it is while it is read"):
        scan_unchanged(files[0])


def test_files_without_a_time_have_no_stamps(tmp_path, files, monkeypatch):
    """Some stores behind URLs tell none: a change would not be seen, so nothing is kept."""
    monkeypatch.setattr(storage, "size_and_time", lambda path: (os.path.getsize(path), 0))
    store = str(tmp_path / "store")
    write_scans(store, {file: scan_unchanged(file) for file in files})
    assert read_scans(store, files) == {}
