"""The benchmark compares ways that do the same; its rates by a clock that is told, and its table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from clock import Clock

from benchmarks import data_benchmark, encoding_speed, plain_packing
from benchmarks.data_benchmark import DESCRIPTION, MEMORY_COLUMNS, BenchmarkConfig, main
from benchmarks.encoding_speed import make_packs
from benchmarks.plain_packing import pack_plainly, serialize
from benchmarks.synthetic_data import write_sequences
from bert_packed import schema
from bert_packed.core.command_line import run
from bert_packed.records.example_bytes import serialize_examples
from data_gen import pack_job
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import compare_files

ROOT = Path(__file__).parents[2]


def test_both_ways_pack_the_same_sequences(tmp_path):
    paths = write_sequences(tmp_path / "in", 300, 64, num_files=2)
    assert pack_plainly(paths, tmp_path / "plain.tfrecord", 64, 3)[0] == 300
    config = PackConfig(
        input_file=",".join(paths),
        output_dir=str(tmp_path / "out"),
        max_seq_length=64,
        max_sequences_per_pack=3,
        algorithm="lpfhp",
    )
    manifest = pack(config)
    packed = [str(tmp_path / "out" / entry["name"]) for entry in manifest["files"]]
    assert compare_files(paths, packed, "error").is_equal
    assert compare_files(paths, [str(tmp_path / "plain.tfrecord")], "error").is_equal
    assert manifest["packing_factor"] > 1.2


def test_both_ways_encode_the_same_packs():
    arrays = make_packs(5, 40, 3)
    assert arrays[schema.INPUT_MASK].max() == 3
    again, other = make_packs(5, 40, 3), make_packs(5, 40, 3, seed=1)
    assert all(np.array_equal(values, again[name]) for name, values in arrays.items())
    assert not np.array_equal(arrays[schema.INPUT_IDS], other[schema.INPUT_IDS])
    fast = serialize_examples(arrays)
    for row, record in enumerate(fast):
        plain = serialize({name: values[row].tolist() for name, values in arrays.items()})
        assert tf.train.Example.FromString(plain) == tf.train.Example.FromString(record)


def test_random_packs_are_packs():
    """Sequences are contiguous, positions restart, and [CLS] stands where a sequence begins."""
    arrays = make_packs(4, 40, 3)
    for row in range(4):
        owners = arrays[schema.INPUT_MASK][row].tolist()
        starts = arrays[schema.NEXT_SENTENCE_POSITIONS][row].tolist()
        assert owners == sorted(owners) and starts[0] == 0 and starts == sorted(starts)
        assert set(owners) <= {1, 2, 3}
        for token, owner in enumerate(owners):
            assert arrays[schema.POSITION_IDS][row, token] == token - starts[owner - 1]


@pytest.fixture
def writing(monkeypatch):
    """Files of which writing takes 4 seconds after the first, which warms up; how many records each got."""
    clock, written = Clock(), []
    takes = clock.taking([100, 4, 100, 4])

    def write_records(path, records):
        written.append(len(list(records)))
        takes()

    monkeypatch.setattr(encoding_speed, "time", clock)
    monkeypatch.setattr(encoding_speed.tfrecords, "write_records", write_records)
    return written


def test_rates_are_of_the_packs_that_were_written(writing):
    # Who is ready waits for the others, and the clock starts when all are
    barrier = SimpleNamespace(wait=encoding_speed.time.taking([1000, 1000]))
    start = encoding_speed.time.now
    assert encoding_speed.measure_batched((3, 8, 32, 2, barrier)) == 3 * 8 / 4
    # an eighth of them, one at a time
    assert encoding_speed.measure_plain((3, 8, 32, 2, barrier)) == 3 / 4
    assert writing == [1, 24, 1, 3]
    assert encoding_speed.time.now - start == 2 * (100 + 1000 + 4)


def test_encoding_is_summed_over_processes_and_the_best_counts(monkeypatch):
    """Three ways, two turns; the processes of a way write at the same time."""
    rates = {"plain": [[10.0], [8.0]], 1: [[30.0], [40.0]], 2: [[20.0, 25.0], [50.0, 10.0]]}
    asked = []

    class Pool:
        def __init__(self, processes):
            assert processes == 2

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, measure, arguments, chunksize):
            asked.append(arguments[0])
            key = "plain" if measure is encoding_speed.measure_plain else len(arguments)
            assert chunksize == 1 and arguments == [arguments[0]] * len(arguments)
            return rates[key].pop(0)

    class Manager(Pool):
        def __init__(self):
            pass

        def Barrier(self, parties):  # noqa: N802 - as multiprocessing calls it
            return ("barrier", parties)

    context = SimpleNamespace(Manager=Manager, Pool=Pool)
    monkeypatch.setattr(data_benchmark.multiprocessing, "get_context", lambda _: context)
    config = BenchmarkConfig(
        num_sequences=3 * 8 * 512, max_seq_length=64, max_sequences_per_pack=5, num_workers=2, repeats=2
    )
    rows = data_benchmark.encoding_rows(config)
    found = [(row["way"], row["processes"], row["per second"], row["times the first"]) for row in rows]
    assert found == [("one Example at a time", 1, 10, 1), ("batched", 1, 40, 4), ("batched", 2, 60, 6)]
    assert {row["unit"] for row in rows} == {"packs"}
    assert asked == [(3, 512, 64, 5, ("barrier", processes)) for processes in (1, 1, 2)] * 2


def test_packing_counts_its_best_time_and_its_largest_memory(monkeypatch, tmp_path):
    """Each way in each turn in a process of its own."""
    mebibyte = 2**20
    found = {
        ("one Example at a time", 1): [(5.0, 9 * mebibyte, 9 * mebibyte), (4.0, 8 * mebibyte, 10 * mebibyte)],
        ("pack_tfrecords", 1): [(50.0, mebibyte, 2 * mebibyte), (40.0, 3 * mebibyte, 3 * mebibyte)],
        ("pack_tfrecords", 3): [(60.0, None, None), (70.0, None, None)],
    }
    pools, order = [], []

    class Pool:
        def __init__(self, processes, _):
            pools.append(processes)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, way, paths, folder, config):
            assert function is data_benchmark._measure_packing and len(paths) == 8
            order.append(way)
            return SimpleNamespace(result=lambda: found[way].pop(0))

    monkeypatch.setattr(data_benchmark.futures, "ProcessPoolExecutor", Pool)
    config = BenchmarkConfig(num_sequences=16, max_seq_length=16, num_workers=3, repeats=2)
    rows = data_benchmark.packing_rows(config, tmp_path)
    columns = ("way", "processes", "unit", "per second", "times the first", *MEMORY_COLUMNS)
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("one Example at a time", 1, "sequences", 5, 1, 9, 10),
        ("pack_tfrecords", 1, "sequences", 50, 10, 3, 3),
        ("pack_tfrecords", 3, "sequences", 70, 14, "not measured", "not measured"),
    ]
    assert order == list(found) * 2 and pools == [1] * 6


@pytest.mark.parametrize("way", ["pack_tfrecords", "one Example at a time"])
def test_one_measurement_packs_what_it_counts(monkeypatch, tmp_path, way):
    """All sequences in the fast way; those of one file of eight in the slow one."""
    clock, packed = Clock(), []

    class Watch:
        largest_growth, total_growth = 5, 6

        def __enter__(self):
            packed.append("watched")
            return self

        def __exit__(self, *_):
            packed.append("over")

    def count(*arguments):
        packed.append(arguments)
        clock.now += 4

    monkeypatch.setattr(data_benchmark, "time", clock)
    monkeypatch.setattr(data_benchmark, "MemoryWatch", Watch)
    monkeypatch.setattr(pack_job, "pack", count)
    monkeypatch.setattr(plain_packing, "pack_plainly", count)
    config = BenchmarkConfig(num_sequences=160, max_seq_length=64, max_sequences_per_pack=5)
    paths = [f"in-{number}" for number in range(8)]
    found = data_benchmark._measure_packing((way, 3), paths, str(tmp_path), config)
    begin, arguments, end = packed
    assert (begin, end) == ("watched", "over")
    if way == "pack_tfrecords":
        assert found == (160 / 4, 5, 6)
        (used,) = arguments
        assert (used.input_file, used.num_workers, used.algorithm) == (",".join(paths), 3, "lpfhp")
        assert (used.max_seq_length, used.max_sequences_per_pack) == (64, 5)
    else:
        assert found == (20 / 4, 5, 6)
        assert arguments == (["in-0"], str(tmp_path / "output" / "packs.tfrecord"), 64, 5)
    assert not os.listdir(tmp_path)


def test_packing_is_measured_above_its_own_imports(tmp_path):
    """What the straightforward way imports, TensorFlow, would hide what the workers of packing take."""
    paths = write_sequences(tmp_path / "in", 300, 64, num_files=2)
    program = f"""
import sys
from benchmarks.data_benchmark import BenchmarkConfig, _measure_packing
config = BenchmarkConfig(num_sequences=300, max_seq_length=64)
_measure_packing(("pack_tfrecords", 1), {paths!r}, {str(tmp_path)!r}, config)
sys.exit("tensorflow" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("encoding", [True, False])
def test_what_is_not_asked_for_is_not_measured(monkeypatch, tmp_path, capsys, plain, encoding):
    monkeypatch.setattr(data_benchmark, "encoding_rows", lambda config: [{"of": "encoding"}])
    monkeypatch.setattr(data_benchmark, "packing_rows", lambda config, _: [{"of": f"plain {config.plain}"}])
    table = tmp_path / "table.json"
    argv = ["benchmark", f"--plain={plain}", f"--encoding={encoding}", f"--json={table}"]
    assert run(main, BenchmarkConfig, DESCRIPTION, argv) == 0
    assert [row["of"] for row in json.loads(table.read_text())] == ["encoding"] * encoding + [
        f"plain {plain}"
    ]


@pytest.mark.slow  # processes that import TensorFlow, one for each way
def test_the_command_prints_and_writes_a_table(tmp_path, capsys):
    flags = {"num_sequences": 64, "max_seq_length": 32, "repeats": 1, "num_workers": 1}
    flags |= {"work_dir": tmp_path, "json": tmp_path / "table.json"}
    argv = ["data_benchmark", *(f"--{name}={value}" for name, value in flags.items())]
    assert run(main, BenchmarkConfig, DESCRIPTION, argv) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert next(row["way"] for row in rows if row["unit"] == "sequences") == "one Example at a time"
    for row in rows:  # each against the first of its kind
        first = next(other for other in rows if other["unit"] == row["unit"])
        assert row["times the first"] == pytest.approx(row["per second"] / first["per second"])
    for row in rows:
        memory = [row["MiB, largest process"], row["MiB, all processes"]]
        is_measured = row["unit"] == "sequences" and sys.platform.startswith("linux")
        assert (0 < memory[0] <= memory[1]) if is_measured else memory == ["not measured"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert capsys.readouterr().out.startswith("CPU: ")
