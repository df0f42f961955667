"""The benchmark compares ways that do the same, and its table can be read by programs."""

import json
import sys

import numpy as np
import tensorflow as tf

from bert_packed.reports.data_benchmark import DESCRIPTION, BenchmarkConfig, main
from bert_packed.reports.encoding_speed import make_packs
from bert_packed.reports.plain_packing import pack_plainly, serialize
from bert_packed.reports.synthetic_data import write_sequences
from data_gen import schema
from data_gen.assembly.pack_config import PackConfig
from data_gen.assembly.pack_job import pack
from data_gen.checks.verification import compare_files
from data_gen.cli.command_line import run
from data_gen.records.example_bytes import serialize_examples


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
    fast = serialize_examples(arrays)
    for row, record in enumerate(fast):
        plain = serialize({name: values[row].tolist() for name, values in arrays.items()})
        assert tf.train.Example.FromString(plain) == tf.train.Example.FromString(record)


def test_synthetic_lengths_are_as_asked(tmp_path):
    paths = write_sequences(tmp_path, 10, 16, num_files=3)
    counts = [sum(1 for _ in tf.data.TFRecordDataset(path)) for path in paths]
    assert np.sum(counts) == 10 and min(counts) > 0


def test_the_command_prints_and_writes_a_table(tmp_path, capsys):
    flags = {"num_sequences": 64, "max_seq_length": 32, "repeats": 1, "num_workers": 1}
    flags |= {"work_dir": tmp_path, "json": tmp_path / "table.json"}
    argv = ["data_benchmark", *(f"--{name}={value}" for name, value in flags.items())]
    assert run(main, BenchmarkConfig, DESCRIPTION, argv) == 0
    rows = json.loads((tmp_path / "table.json").read_text())
    assert next(row["way"] for row in rows if row["unit"] == "sequences") == "one Example at a time"
    assert all(row["per second"] > 0 for row in rows)
    for row in rows:
        memory = [row["MiB, largest process"], row["MiB, all processes"]]
        is_measured = row["unit"] == "sequences" and sys.platform.startswith("linux")
        assert (0 < memory[0] <= memory[1]) if is_measured else memory == ["not measured"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert capsys.readouterr().out.startswith("CPU: ")
