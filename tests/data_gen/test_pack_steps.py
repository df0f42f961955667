"""The sizes of runs and parts, which bound the memory, leave no trace in the packs."""

from pathlib import Path

import numpy as np
import pytest
from causal_files import write_causal
from crash import all_bytes
from unpacked_records import make_features, write_features

from bert_packed.core import storage
from bert_packed.records import tfrecords
from data_gen import pack_steps
from data_gen.assignments import read_run
from data_gen.jobs.steps import read_array
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

S = 16


@pytest.fixture
def groups(monkeypatch):
    """Runs and parts of some packs; dict that is filled with how many of them there were."""
    found = {"runs of a file": [], "parts": [], "files of a part": [], "levels": set()}
    read, sort, measure = pack_steps.read_file, pack_steps.sort_run, pack_steps.measure_part

    def count_runs(work):
        result = read(work)
        found["runs of a file"].append(len(result["runs"]))
        return result

    def count_parts(argument):
        sort(argument)
        found["parts"].append(len(read_array(argument[0].part_ends_path)))

    def count_owners(work_and_part):
        work, part = work_and_part
        span, group = divmod(part.index, work.fan_out)
        paths = work.sorted_paths(work.num_levels - 1, 0, span)
        pieces = [read_run(path, work.assignment.layout, group) for path in paths]
        found["files of a part"].append(sum(len(piece) > 0 for piece in pieces))
        found["levels"].update(int(path.name.split("-")[1]) for path in Path(work.folder).glob("*.run"))
        return measure(work_and_part)

    monkeypatch.setattr(pack_steps, "RUN_BYTES", 80 * S)
    monkeypatch.setattr(tfrecords, "READ_BATCH", 16)  # a run is of whole batches
    monkeypatch.setattr(pack_steps, "PACKS_AT_ONCE", 7)
    monkeypatch.setattr(storage, "flush_to_disk", lambda path: None)  # hundreds of files
    monkeypatch.setattr(pack_steps, "read_file", count_runs)
    monkeypatch.setattr(pack_steps, "sort_run", count_parts)
    monkeypatch.setattr(pack_steps, "measure_part", count_owners)
    return found


def write_bert(path, lengths, seed):
    write_features(path, make_features(lengths, S, seed))


@pytest.mark.parametrize("fan_in", [2, 4, 10**6])
@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (write_bert, {"max_seq_length": S}),
        (write_bert, {"features": f"input_ids:int:{3 * S}"}),
        (write_causal, {"max_seq_length": S}),
        (write_causal, {"max_seq_length": S, "split_sequences": True, "num_rows": 3}),
    ],
)
def test_small_runs_and_parts_give_the_same_bytes(tmp_path, groups, write, changes, fan_in, monkeypatch):
    """Several runs of each file and several parts of each shard: in production, 32 to 128 MiB each.

    Merged runs lose no group, and leave the disk with the last of their groups.
    """
    monkeypatch.setattr(pack_steps, "FAN_IN", fan_in)
    rng = np.random.default_rng(0)
    for seed, name in enumerate("ab"):
        write(tmp_path / f"{name}.tfrecord", rng.integers(2, S + 1, 100), seed)
    settings = {"input_file": f"{tmp_path}/?.tfrecord", "num_shards": 2, **changes}
    settings |= {"provenance": True, "num_workers": 1}
    pack(PackConfig(output_dir=str(tmp_path / "small"), **settings))
    assert min(groups["runs of a file"]) >= 3
    assert min(groups["parts"]) >= 6  # three of each shard
    num_levels = pack_steps.choose_num_levels(sum(groups["runs of a file"]))
    assert groups["levels"] == {num_levels - 1}
    if num_levels == 1:
        assert max(groups["files of a part"]) >= 4  # which are of both files
    else:
        assert 2 <= max(groups["files of a part"]) <= fan_in
    monkeypatch.undo()
    pack(PackConfig(output_dir=str(tmp_path / "whole"), **settings))
    assert all_bytes(tmp_path / "small") == all_bytes(tmp_path / "whole")


def test_runs_leave_the_disk_once_they_are_sorted(tmp_path, monkeypatch):
    seen, measure = [], pack_steps.measure_part

    def look(work_and_part):
        seen.append(sorted(path.name for path in Path(work_and_part[0].folder).glob("*.run")))
        return measure(work_and_part)

    monkeypatch.setattr(pack_steps, "measure_part", look)
    path = write_features(tmp_path / "in.tfrecord", make_features([5, 6, 7, 5, 5, 9], S))
    pack(PackConfig(path, f"{tmp_path}/out", max_seq_length=S, num_workers=1))
    assert seen and all(names == ["sorted-0-000000-000000.run"] for names in seen)
