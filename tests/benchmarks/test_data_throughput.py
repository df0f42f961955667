"""Data throughput: ways that do the same, rates of what was written, the best of repeats."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tensorflow as tf
from benchmark_command import run_benchmark, tables_of

from benchmarks import data_throughput
from benchmarks.data_throughput import AT_ONCE, PACK, PLAIN, PackingRun, make_packs, packing_rows, phase_rows
from benchmarks.plain_packing import pack_plainly, serialize_one_by_one
from benchmarks.synthetic_data import write_sequences
from bert_packed import schema
from bert_packed.records.example_bytes import serialize_examples
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.verification import compare_files


def test_both_ways_pack_the_same_sequences(tmp_path):
    paths = write_sequences(tmp_path / "in", 300, 64, num_files=2)
    assert pack_plainly(paths, tmp_path / "plain.tfrecord", 64, 3) == 300
    sizes = {"max_seq_length": 64, "max_sequences_per_pack": 3, "algorithm": "lpfhp"}
    manifest = pack(PackConfig(input_file=",".join(paths), output_dir=str(tmp_path / "out"), **sizes))
    packed = [str(tmp_path / "out" / entry["name"]) for entry in manifest["files"]]
    assert compare_files(paths, packed, "error").is_equal
    assert compare_files(paths, [str(tmp_path / "plain.tfrecord")], "error").is_equal
    assert manifest["packing_factor"] > 1.2


def test_both_ways_encode_the_same_packs():
    arrays = make_packs(5, 40, 3)
    assert arrays[schema.INPUT_MASK].max() == 3
    for plain, record in zip(serialize_one_by_one(arrays), serialize_examples(arrays), strict=True):
        assert tf.train.Example.FromString(plain) == tf.train.Example.FromString(record)


def test_rates_are_of_the_packs_that_were_written(monkeypatch):
    """Between two looks at the clock, four seconds apart; one record goes before them, for warmth."""
    events, clock = [], iter([10.0, 14.0] * 2)

    def look():
        events.append("clock")
        return next(clock)

    monkeypatch.setattr(
        data_throughput.tfrecords, "write_records", lambda _, records: events.append(len(list(records)))
    )
    monkeypatch.setattr(data_throughput.time, "perf_counter", look)
    monkeypatch.setattr(data_throughput, "PACKS_AT_ONCE", 8)
    barrier = threading.Barrier(1)
    assert data_throughput.packs_per_second(("batched", 3, 32, 2, barrier)) == 3 * 8 / 4
    assert data_throughput.packs_per_second((PLAIN, 3, 32, 2, barrier)) == 3 / 4  # an eighth, one at a time
    assert events == [1, "clock", 24, "clock", 1, "clock", 3, "clock"]


def test_the_best_rate_and_the_largest_memory_count():
    mebibyte = 2**20
    runs = {
        (PLAIN, 1): [PackingRun(5.0, None, None, {}), PackingRun(4.0, None, None, {})],
        (PACK, 1): [
            PackingRun(50.0, mebibyte, 2 * mebibyte, {"read": 4.0, "write": 2.0}),
            PackingRun(40.0, 3 * mebibyte, 3 * mebibyte, {"read": 9.0, "write": 9.0}),
        ],
        (PACK, 2): [PackingRun(70.0, 0, 0, {"read": 1.0, "write": 2.0, "wait": 1.0})],
        (AT_ONCE, 2): [PackingRun(60.0, 0, 0, {"read": 7.0, "write": 7.0})],
    }
    rows = packing_rows(runs)
    assert [row["sequences/s"] for row in rows] == [5, 50, 70, 60]
    assert [row["times the first"] for row in rows] == [1, 10, 14, 12]
    assert [row["MiB, largest process"] for row in rows[:2]] == [None, 3]
    assert rows[1]["MiB, all processes"] == 3
    assert phase_rows(runs) == [
        {"phase": "read", "one process, s": 4.0, "several, s": 1.0, "times": 4.0},
        {"phase": "write", "one process, s": 2.0, "several, s": 2.0, "times": 1.0},
    ]


def test_the_command_on_records(tmp_path, capsys):
    paths = write_sequences(tmp_path / "in", 60, 32, num_files=2)
    flags = {"input_file": ",".join(paths), "max_seq_length": 32, "repeats": 1, "encoding": "false"}
    tables = tables_of("data_throughput", tmp_path, **flags)
    ways = [(row["way"], row["processes"]) for row in tables["pack from file to file"]]
    assert ways == [(PACK, 1), (PACK, 2), (AT_ONCE, 2)]
    assert "plan" in {row["phase"] for row in tables["phases"]}
    for row in tables["pack from file to file"]:
        if sys.platform.startswith("linux"):
            assert 0 <= row["MiB, largest process"] <= row["MiB, all processes"]
    assert run_benchmark("data_throughput", **flags | {"input_file": tmp_path / "none"}) == 2
    assert "`input_file` must match at least one file" in capsys.readouterr().err


@pytest.mark.slow  # processes that import TensorFlow, one for each way
def test_a_measurement(tmp_path):
    flags = {"num_sequences": 64, "max_seq_length": 32, "repeats": 1}
    tables = tables_of("data_throughput", tmp_path, **flags)
    assert [row["way"] for row in tables["encode and write packs"]] == [PLAIN, "batched", "batched"]
    assert tables["pack from file to file"][0]["way"] == PLAIN


def test_the_straightforward_way_is_measured_above_its_imports(tmp_path):
    """In the same process TensorFlow would hide what the workers of packing take."""
    program = "import sys, benchmarks.data_throughput as d; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0
