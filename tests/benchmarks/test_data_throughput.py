"""The best of repeats counts; peaks of processes are above what was there before."""

import itertools
import sys
import types

import numpy as np
import pytest

from benchmarks import data_throughput, step_memory
from benchmarks.data_throughput import AT_ONCE, PACK, PackingRun, packing_rows
from benchmarks.step_memory import MemoryConfig, MemoryWatch, memory_row, read_memory
from bert_packed.core.storage import write_json

MEBIBYTE = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def test_the_best_rate_and_the_largest_memory_count():
    runs = {
        (PACK, 1): [PackingRun(5.0, MEBIBYTE, 2 * MEBIBYTE), PackingRun(4.0, 3 * MEBIBYTE, 3 * MEBIBYTE)],
        (PACK, 2): [PackingRun(40.0, None, None), PackingRun(50.0, None, None)],
        (AT_ONCE, 2): [PackingRun(60.0, 0, 0)],
    }
    rows = packing_rows(runs)
    assert [row["sequences/s"] for row in rows] == [5, 50, 60]
    assert [row["times the first"] for row in rows] == [1, 10, 12]
    assert [row["MiB, largest process"] for row in rows] == [3, None, 0]
    assert rows[0]["MiB, all processes"] == 3


def test_commands_at_once_pack_the_input_each(tmp_path, monkeypatch):
    def start(num_workers, json, **flags):
        write_json(json, [{"sequences": 10 * num_workers}])
        return types.SimpleNamespace(communicate=lambda: ("", ""), returncode=0)

    monkeypatch.setattr(data_throughput, "_start", start)
    moments = itertools.count(step=2.0)
    monkeypatch.setattr(data_throughput.time, "perf_counter", lambda: next(moments))
    for num_commands, num_workers, rate in ((1, 1, 5), (1, 3, 15), (3, 1, 15)):
        given = data_throughput.ThroughputConfig(), num_commands, num_workers
        assert data_throughput._pack_by_commands("in", str(tmp_path), *given).rate == rate


@linux
def test_growth_of_this_process():
    before = np.ones(100 * MEBIBYTE, np.uint8)  # of the base, and not of the growth
    with MemoryWatch() as watch:
        np.ones(60 * MEBIBYTE, np.uint8).tobytes()  # twice: the array, and its bytes
        assert before[0] == 1
    assert 110 <= watch.largest_growth / MEBIBYTE < 160
    assert watch.total_growth == watch.largest_growth


def write_process(folder, process, parent, peak=None, name="python"):
    """Files about a process as Linux has them under /proc."""
    (folder / str(process)).mkdir()
    (folder / str(process) / "stat").write_text(f"{process} ({name}) S {parent} 1 1 0 -1")
    field = "" if peak is None else f"VmHWM:\t  {peak} kB\n"
    (folder / str(process) / "status").write_text(f"Name:\t{name}\n{field}VmRSS:\t   40 kB\n")


def test_memory_and_processes_are_read_as_linux_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(step_memory, "PROCESSES", str(tmp_path))
    write_process(tmp_path, 10, 1, peak=70)
    write_process(tmp_path, 30, 10)
    write_process(tmp_path, 31, 30, name="a (child) S 7 7")  # of a child
    write_process(tmp_path, 13, 1)
    (tmp_path / "99").mkdir()  # it has ended meanwhile
    assert step_memory.find_descendants(10) == [30, 31] and step_memory.find_descendants(13) == []
    assert read_memory(10, "VmHWM") == 70 * 1024 and read_memory(10, "VmRSS") == 40 * 1024
    assert read_memory(30, "VmHWM") is None and read_memory(99, "VmRSS") is None


def test_each_process_counts_at_its_peak_above_the_base(monkeypatch):
    """A process that ends before the others, one below the base, and this one, looked at once more."""
    peaks = {"first": iter([500, 900, None, None]), "second": iter([700, 700, 650, 400])}
    peaks["small"] = iter([50] * 4)
    own = iter([300, 1000])
    monkeypatch.setattr(step_memory, "read_memory", lambda process, field: next(peaks.get(process, own)))
    monkeypatch.setattr(MemoryWatch, "_look_until_over", lambda watch: None)
    watch = MemoryWatch()
    watch.__enter__()
    for _ in range(4):
        watch._look(list(peaks))
    watch.__exit__()
    assert (watch.largest_growth, watch.total_growth) == (700, 600 + 400 + 0 + 700)


def test_memory_is_by_the_tokens_that_are_computed_at_once():
    for micro, by_token in ((0, 4.0), (2, 8.0)):
        row = memory_row(64, MemoryConfig(batch_size=4, micro_batch_size=micro), 1 << 20, 3 << 20)
        assert (row["temporaries, MiB"], row["KiB a token"], row["process, MiB"]) == (1, by_token, 3)
