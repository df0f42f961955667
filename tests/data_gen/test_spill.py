"""What is spilled comes back, whole or group by group; files appear when complete."""

import errno
import os

import numpy as np
import pytest

from bert_packed.core import files
from bert_packed.records import columns as column_module
from bert_packed.records.columns import Column, join_rows, take_rows
from data_gen.spill import read_spill, write_spill

layout = {
    "sizes": Column("<i4"),
    "pair": Column("<f4", width=2),
    "tokens": Column("<i4", "sizes"),
    "frames": Column("<f4", "sizes", width=3),
}


def make_columns(num_rows=9, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, num_rows).astype(np.int32)
    return {
        "sizes": sizes,
        "pair": rng.random(2 * num_rows).astype(np.float32),
        "tokens": rng.integers(0, 99, sizes.sum()).astype(np.int32),
        "frames": rng.random(3 * sizes.sum()).astype(np.float32),
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert np.array_equal(one[name], other[name]), name


@pytest.mark.parametrize("folder", ["", "ram://spill"])
def test_groups_and_whole_come_back(tmp_path, folder):
    folder = folder or str(tmp_path)
    files.make_folder(folder)
    columns = make_columns()
    write_spill(f"{folder}/x.spill", columns, layout, [2, 0, 4, 3])
    assert files.list_names(folder) == ["x.spill"]
    assert_equal(read_spill(f"{folder}/x.spill", layout), columns)
    parts = [read_spill(f"{folder}/x.spill", layout, group) for group in range(4)]
    assert [len(part["sizes"]) for part in parts] == [2, 0, 4, 3]
    assert_equal(join_rows(parts, layout), columns)
    some = read_spill(f"{folder}/x.spill", layout, 2, {"tokens"})
    assert list(some) == ["tokens"] and np.array_equal(some["tokens"], parts[2]["tokens"])


def test_columns_are_written_in_the_types_of_the_layout(tmp_path):
    """As whose they are read."""
    columns = make_columns()
    wider = {name: values.astype(values.dtype.kind + "8") for name, values in columns.items()}
    write_spill(tmp_path / "x.spill", wider, layout, [9])
    found = read_spill(tmp_path / "x.spill", layout)
    assert_equal(found, columns)
    assert {name: values.dtype.str for name, values in found.items()} == {
        name: column.dtype for name, column in layout.items()
    }


def test_a_group_is_read_without_the_others(tmp_path, monkeypatch):
    """A sorted run may have ten thousand groups, and each of as many parts reads one of every run."""
    num_read = []

    class Counting:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self._file.close()

        def seek(self, place):
            return self._file.seek(place)

        def read(self, size):
            num_read.append(size)
            return self._file.read(size)

    columns = make_columns(num_rows=2000)
    open_file = files.open_file
    monkeypatch.setattr(files, "open_file", lambda path, mode="rb": Counting(open_file(path, mode)))
    sums = []
    for num_groups in (2000, 4):
        with monkeypatch.context() as plainly:
            plainly.setattr(files, "open_file", open_file)
            write_spill(tmp_path / "x.spill", columns, layout, [2000 // num_groups] * num_groups)
        num_read.clear()
        read_spill(tmp_path / "x.spill", layout, 3, {"sizes"})
        sums.append(sum(num_read))
    assert sums[0] < 150  # one row, and where it lies
    assert sums[1] - sums[0] > 499 * 3


def test_rows_are_taken_by_number_in_pieces(monkeypatch):
    columns = make_columns(num_rows=50)
    rows = np.random.default_rng(1).permutation(50)
    whole = take_rows(columns, layout, rows)
    for values_at_once in (1, 7):
        monkeypatch.setattr(column_module, "VALUES_AT_ONCE", values_at_once)
        assert_equal(take_rows(columns, layout, rows), whole)


def test_rows_are_taken_by_number():
    columns = make_columns()
    rows = np.array([4, 0, 8, 4])
    taken = take_rows(columns, layout, rows)
    offsets = np.concatenate([[0], np.cumsum(columns["sizes"])])
    expected = [columns["frames"].reshape(-1, 3)[offsets[row] : offsets[row + 1]] for row in rows]
    assert np.array_equal(taken["frames"].reshape(-1, 3), np.concatenate(expected))
    assert np.array_equal(taken["pair"].reshape(-1, 2), columns["pair"].reshape(-1, 2)[rows])


@pytest.mark.parametrize("folder", ["", "ram://files"])
def test_a_file_appears_when_complete_or_not_at_all(tmp_path, folder):
    folder = folder or str(tmp_path)
    files.make_folder(folder)
    with files.write_whole(f"{folder}/a") as partial, files.open_file(partial, "wb") as file:
        file.write(b"content")
        assert "a" not in files.list_names(folder)
    assert files.read_text(f"{folder}/a") == "content"
    with pytest.raises(KeyError), files.write_whole(f"{folder}/a") as partial:
        with files.open_file(partial, "wb") as file:
            file.write(b"half")
        raise KeyError
    assert files.list_names(folder) == ["a"] and files.read_text(f"{folder}/a") == "content"
    assert files.size_and_time(f"{folder}/a")[0] == 7
    assert files.match(f"{folder}/*") == [f"{folder}/a"]
    files.remove_folder(folder)
    assert not files.exists(f"{folder}/a")
    with pytest.raises(OSError):
        files.read_text(f"{folder}/a")


def test_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(files, "flush_to_disk", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*x\.spill"):
        write_spill(tmp_path / "x.spill", make_columns(), layout, [9])
    assert list(tmp_path.iterdir()) == []
