"""The benchmark measures starts of a run on data that a run takes; its table by figures that are told."""

import json
import os
from types import SimpleNamespace

import pytest

from benchmarks import resume_benchmark
from benchmarks.resume_benchmark import DESCRIPTION, BenchmarkConfig, main, measure_ways, write_packs
from bert_packed.core.command_line import run
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.runs.pretraining_data import read_data

WAYS = ["start", "start again", "continue at half an epoch, files unknown", "continue at half an epoch"]


def test_the_packs_are_a_run_s_data(tmp_path):
    size = write_packs(BenchmarkConfig(num_packs=103, num_files=4), str(tmp_path))
    assert size == sum(path.stat().st_size for path in tmp_path.glob("*.tfrecord"))
    data = read_data(TrainConfig(input_file=f"{tmp_path}/*.tfrecord", output_dir=f"{tmp_path}/run"))
    assert data.num_packs == 103 and data.train.packing_factor == 2 and data.train.spec.max_seq_length == 16
    assert sorted({entry["num_records"] for entry in data.inputs["input_file"]}) == [25, 26]


def test_the_median_stands_in_the_table_and_turns_are_taken(monkeypatch):
    order, figures = [], iter([(1.0, 5.0, 2**20), (2.0, 6.0, 2**20), (3.0, 7.0, None), (4.0, 8.0, 2**20)] * 3)

    class Pool:
        def __init__(self, processes, _):
            assert processes == 1

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, way, *_):
            assert function is resume_benchmark._measure
            order.append(way)
            known, first, num_read = next(figures)
            return SimpleNamespace(result=lambda: (known, first + len(order), num_read))

    monkeypatch.setattr(resume_benchmark.futures, "ProcessPoolExecutor", Pool)
    rows = measure_ways(BenchmarkConfig(repeats=3), "folder")
    assert [name for name, _ in order] == WAYS * 3
    assert [known for _, known in order] == [
        False,
        True,
    ] * 6  # who knows the files has them from the one before
    assert [row["seconds to the first batch"] for row in rows] == [10, 12, 14, 16]
    assert [row["slowest"] for row in rows] == [14, 16, 18, 20]
    assert [row["MiB read"] for row in rows] == [1, 1, "not measured", 1]


@pytest.mark.slow  # processes that import TensorFlow, one for each way
def test_the_command_prints_and_writes_a_table(tmp_path, capsys):
    flags = {"num_packs": 64 * 100, "num_files": 2, "repeats": 1, "work_dir": tmp_path}
    argv = ["benchmark", *(f"--{name}={value}" for name, value in flags.items())]
    assert run(main, BenchmarkConfig, DESCRIPTION, [*argv, f"--json={tmp_path}/table.json"]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["way"] for row in rows] == WAYS
    for row in rows:
        assert 0 < row["seconds to know the data"] < row["seconds to the first batch"]
    new, again, _, known = (row["MiB read"] for row in rows)
    if new != "not measured":
        assert max(again, known) < new
    assert "6,400 packs in 2 files" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["table.json"]
