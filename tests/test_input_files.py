"""Patterns become files, in order, or a mistake that names the flag."""

import pytest

from data_gen.input_files import find_files
from data_gen.settings import InputError


def test_find_files_sorts_and_joins_patterns(tmp_path):
    for name in ("b.txt", "a.txt", "c[1].txt", "other"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.txt").mkdir()
    pattern = f"{tmp_path}/*.txt, {tmp_path}/a.txt,{tmp_path}/c[1].txt"
    assert [path.rsplit("/", 1)[1] for path in find_files(pattern, "input_file")] == [
        "a.txt",
        "b.txt",
        "c[1].txt",
    ]


def test_a_glob_leaves_our_own_indexes_out(tmp_path):
    for name in ("train-0.tfrecord", "train-0.provenance.npz", "train-1"):
        (tmp_path / name).write_text("x")
    found = find_files(f"{tmp_path}/train-*", "input_file")
    assert found == [f"{tmp_path}/train-0.tfrecord", f"{tmp_path}/train-1"]
    index = f"{tmp_path}/train-0.provenance.npz"
    assert find_files(index, "input_file") == [index]  # the mistake of who names it shows when it is read
    with pytest.raises(InputError, match="must match at least one file"):
        find_files(f"{tmp_path}/*.npz", "input_file")


def test_find_files_refuses_nothing_and_empty_files(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(
        InputError, match=r"`input_file` must match at least one file\. Received: '.*none-\*'"
    ):
        find_files(f"{tmp_path}/a.txt,{tmp_path}/none-*", "input_file")
    (tmp_path / "b.txt").touch()
    with pytest.raises(InputError, match=r"b\.txt, which is empty"):
        find_files(f"{tmp_path}/*", "input_file")
