"""Input files are read once in the life of a run, by one process; the others take its word."""

import shutil
import threading
from pathlib import Path

import pytest
from tiny import write_data

from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json
from bert_packed.parallel.processes import Alone
from bert_packed.records import inputs, tfrecords
from bert_packed.records.tfrecords import scan_file
from bert_packed.runs.input_files import describe_inputs, scan_inputs
from bert_packed.runs.run_directory import SCANS_FILE


@pytest.fixture
def files(tmp_path):
    (tmp_path / "data").mkdir()
    return write_data(tmp_path / "data")


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "run" / SCANS_FILE)


@pytest.fixture
def read(monkeypatch):
    """The files that were read from end to end, by a scan or record by record."""
    found = []
    scan, count = inputs.scan_unchanged, tfrecords.count_records
    monkeypatch.setattr(inputs, "scan_unchanged", lambda path: found.append(path) or scan(path))
    monkeypatch.setattr(tfrecords, "count_records", lambda path: found.append(path) or count(path))
    return found


def flip(path):
    """Change a bit in the middle of a file."""
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 1
    Path(path).write_bytes(content)


def write_manifest(files, *entries, kind="packed"):
    """Write a manifest beside files; `entries` are its own, without their names."""
    listed = [{"name": Path(path).name, **entry} for path, entry in zip(files, entries, strict=False)]
    write_json(Path(files[0]).with_name("manifest.json"), {"kind": kind, "files": listed})


def test_records_must_be_what_their_manifest_says(files, store, read):
    plain = describe_inputs(files)
    assert [entry["num_records"] for entry in plain] == [9, 6]
    write_manifest(files, kind="of another tool")
    assert describe_inputs(files) == plain
    write_manifest(files, *plain)
    assert describe_inputs(files) == plain
    scans = list(scan_inputs(files, store).values())
    read.clear()
    for promise, rule in (
        ({"num_records": 70}, r"must hold 70 records, as .*Received: 9\."),
        ({"sha256": "0"}, r"must have the SHA-256 0, as .*manifest\.json"),
    ):
        write_manifest(files, {**plain[0], **promise})
        # Scans of an earlier start need no second reading
        for known in ({"scans": scans, "are_checked": True}, {}):
            with pytest.raises(InputError, match=rf"packed-0\.tfrecord {rule}"):
                describe_inputs(files, **known)
            assert read == [] or not known
            read.clear()


def same(found, files):
    for path in files:
        new = scan_file(path)
        assert (found[path].sha256, found[path].num_records) == (new.sha256, new.num_records)
        assert found[path].offsets.tolist() == new.offsets.tolist()
    return set(found) == set(files)


def test_a_second_start_reads_what_has_changed_alone(files, store, read):
    assert same(scan_inputs(files, store), files)
    assert read == [*files, *files]  # no manifest: each record is looked at as well
    read.clear()
    assert same(scan_inputs(files, store), files) and read == []
    Path(files[1]).write_bytes(Path(files[0]).read_bytes())
    assert same(scan_inputs(files, store), files) and read == [files[1]] * 2
    read.clear()
    assert same(scan_inputs(files, store), files) and read == []


@pytest.mark.parametrize("is_known", [False, True])
def test_damage_is_named_at_every_start(files, store, is_known):
    """The scan of a damaged file is not kept, and that of a file before it changed is not trusted."""
    if is_known:
        scan_inputs(files, store)
    flip(files[1])
    for find in (
        lambda: scan_inputs(files, store),
        lambda: scan_inputs(files, store),
        lambda: describe_inputs(files),
    ):
        with pytest.raises(InputError, match=r"packed-1\.tfrecord, record \d: .* truncated or corrupt"):
            find()
    assert Path(store).exists() == is_known and not list(Path(files[0]).parent.glob(".scans*"))


class Together(Alone):
    """Processes that are threads of this one."""

    def __init__(self, index, num, barrier):
        self.index, self.num, self.barrier = index, num, barrier

    def first_decides(self, decide):
        decided = decide() if self.is_first else None
        self.barrier.wait(60)
        return decided


def run_together(num, work):
    """The results of `work(processes)` in `num` threads, an error in the place of a result."""
    barrier, found = threading.Barrier(num), [None] * num

    def run(index):
        try:
            found[index] = work(Together(index, num, barrier))
        except InputError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_only_the_first_process_reads(files, store, read):
    for expected in ([*files, *files], []):
        read.clear()
        found = run_together(3, lambda processes: scan_inputs(files, store, processes))
        assert [same(scans, files) for scans in found] == [True] * 3
        assert read == expected


def test_a_machine_with_copies_of_its_own_reads_them(files, store, tmp_path, read, monkeypatch):
    """The same names on another disk: what the first process found is not of these files."""
    stamps = {index: inputs.read_scans for index in range(2)}

    def on_the_other_disk(store, paths):
        return {} if threading.current_thread().name == "other" else stamps[0](store, paths)

    monkeypatch.setattr(inputs, "read_scans", on_the_other_disk)

    def work(processes):
        threading.current_thread().name = "other" if processes.index else "first"
        return scan_inputs(files, store, processes)

    found = run_together(2, work)
    assert [same(scans, files) for scans in found] == [True] * 2
    assert sorted(read) == sorted([*files, *files] * 2)
    # It also says if they are other files
    scan = inputs.scan_unchanged

    def scan_other(path):
        if threading.current_thread().name == "other":
            shutil.copyfile(files[1], tmp_path / "other")
            return scan(str(tmp_path / "other"))
        return scan(path)

    monkeypatch.setattr(inputs, "scan_unchanged", scan_other)
    first, other = run_together(2, work)
    assert same(first, files)
    assert "packed-0.tfrecord must be the same file for every process. Received: SHA-256" in str(other)
