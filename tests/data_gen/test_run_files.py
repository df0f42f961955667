"""Runs come back from the disk, whole or group by group."""

import io

import numpy as np
import pytest

from bert_packed.core import storage
from bert_packed.records.sequences import Column, Sequences, concatenate
from data_gen.assignments import read_run, write_run

layout = {
    "sizes": Column("<i4"),
    "pair": Column("<f4", width=2),
    "tokens": Column("<i4", "sizes"),
    "frames": Column("<f4", "sizes", width=3),
}


def make_sequences(num_rows=9, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, num_rows).astype(np.int32)
    columns = {
        "sizes": sizes,
        "pair": rng.random(2 * num_rows).astype(np.float32),
        "tokens": rng.integers(0, 99, sizes.sum()).astype(np.int32),
        "frames": rng.random(3 * sizes.sum()).astype(np.float32),
    }
    return Sequences(layout, columns)


def assert_equal(one, other):
    assert one.layout == other.layout
    for name, column in one.layout.items():
        assert np.array_equal(one[name], other[name]) and one[name].dtype == column.dtype, name


@pytest.mark.parametrize("folder", ["", "ram://runs"])
def test_groups_and_whole_come_back(tmp_path, folder):
    folder = folder or str(tmp_path)
    storage.make_folder(folder)
    sequences = make_sequences()
    write_run(f"{folder}/x.run", sequences, [2, 0, 4, 3])
    assert storage.list_names(folder) == ["x.run"]
    assert_equal(read_run(f"{folder}/x.run", layout), sequences)
    parts = [read_run(f"{folder}/x.run", layout, group) for group in range(4)]
    assert [len(part) for part in parts] == [2, 0, 4, 3]
    assert_equal(concatenate(parts), sequences)
    some = read_run(f"{folder}/x.run", layout, 2, {"sizes", "tokens"})
    assert list(some.layout) == ["sizes", "tokens"] and np.array_equal(some["tokens"], parts[2]["tokens"])


def test_columns_are_written_in_the_types_of_the_layout(tmp_path):
    """As whose they are read."""
    sequences = make_sequences()
    wider = {name: values.astype(values.dtype.kind + "8") for name, values in sequences.columns.items()}
    write_run(tmp_path / "x.run", Sequences(layout, wider), [9])
    assert_equal(read_run(tmp_path / "x.run", layout), sequences)


def test_a_group_is_read_without_the_others(tmp_path, monkeypatch):
    """A sorted run may have ten thousand groups, and each of as many parts reads one of every run."""
    num_read = []

    class Counting(io.BytesIO):
        def read(self, size):
            num_read.append(size)
            return super().read(size)

    sequences, sums = make_sequences(num_rows=2000), []
    for num_groups in (2000, 4):
        write_run(tmp_path / "x.run", sequences, [2000 // num_groups] * num_groups)
        num_read.clear()
        with monkeypatch.context() as counted:
            counted.setattr(storage, "open_file", lambda path, **_: Counting(path.read_bytes()))
            read_run(tmp_path / "x.run", layout, 3, {"sizes"})
        sums.append(sum(num_read))
    assert sums[0] < 150  # one row, and where it lies
    assert sums[1] - sums[0] > 499 * 3
