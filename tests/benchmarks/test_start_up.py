"""Starts: a command that does not end as it must is named; the packs are a run's data."""

import types

import pytest
from benchmark_command import tables_of

from benchmarks import start_up
from benchmarks.start_up import AGAIN, CONTINUE, START, UNKNOWN, StartConfig
from bert_packed.__main__ import COMMANDS
from bert_packed.core.settings import InputError
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.pretraining_data import read_data


@pytest.mark.parametrize(
    ("is_help", "status", "message"),
    [(True, 1, "why"), (False, 0, ""), (False, 2, "unknown flag 'checkpoint'")],
)
def test_a_command_must_end_as_it_says(monkeypatch, is_help, status, message):
    """With 0 from its help; with 2, and the name of what is missing, otherwise."""
    ended = types.SimpleNamespace(returncode=status, stderr=message)
    monkeypatch.setattr(start_up.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(InputError, match=rf"export must end with status [02].* Received: {status}, "):
        start_up.start("export", is_help)


def test_the_table_has_the_medians_of_each_way(monkeypatch, tmp_path):
    monkeypatch.setattr(start_up, "COMMANDS", {"squad_eval": start_up.COMMANDS["squad_eval"]})
    (row,) = tables_of("start_up", tmp_path, repeats=1)["commands"]  # a process
    assert row.pop("command") == "squad_eval" and all(value > 0 for value in row.values())
    times = {True: iter([4.0, 6.0, 5.0]), False: iter([9.0, 5.0, 7.0])}
    monkeypatch.setattr(start_up, "start", lambda name, is_help: next(times[is_help]))
    assert start_up.command_rows(3) == [{"command": "squad_eval", "--help, s": 5.0, "missing input, s": 7.0}]


def test_every_command_of_the_package_is_started():
    assert {module for module, *_ in start_up.COMMANDS.values()} == {
        module for module, _ in COMMANDS.values()
    }
    assert all(module.endswith(name) for name, (module, *_) in start_up.COMMANDS.items())


@pytest.mark.slow
def test_every_command_names_a_missing_input():
    for name in start_up.COMMANDS:
        start_up.start(name, is_help=False)  # raises, were status or message others'


def test_the_packs_are_a_run_s_data(tmp_path):
    size = start_up.write_packs(StartConfig(of="first_batch", num_packs=104, num_files=4), str(tmp_path))
    assert size == sum(path.stat().st_size for path in tmp_path.glob("*.tfrecord"))
    data = read_data(PretrainingConfig(input_file=f"{tmp_path}/*.tfrecord", output_dir=f"{tmp_path}/run"))
    assert data.num_packs == 104 and data.train.packing_factor == 2 and data.train.spec.max_seq_length == 16
    assert [entry["num_records"] for entry in data.inputs["input_file"]] == [26] * 4


@pytest.mark.slow  # a process that imports TensorFlow
def test_what_is_known_of_files_is_not_read_again(tmp_path):
    flags = {"of": "first_batch", "num_packs": 64 * 100, "num_files": 2, "repeats": 1}
    rows = tables_of("start_up", tmp_path, **flags)["first batch"]
    assert [row["way"] for row in rows] == [START, AGAIN, UNKNOWN, CONTINUE]
    assert all(0 < row["seconds to know the data"] < row["seconds to the first batch"] for row in rows)
    read = {row["way"]: row["MiB read"] for row in rows}
    if read[START] is not None:
        assert max(read[AGAIN], read[CONTINUE]) < read[START]
