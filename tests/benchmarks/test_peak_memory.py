"""Peak memory is that of each process itself, above what it began with, and only where the system has it."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import peak_memory
from benchmarks.peak_memory import MemoryWatch, read_memory

MEBIBYTE = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def fill(num_mebibytes):
    return len(np.ones(num_mebibytes * MEBIBYTE, np.uint8).tobytes())  # twice: the array, and its bytes


@linux
def test_growth_of_this_process():
    before = np.ones(100 * MEBIBYTE, np.uint8)  # of the base, and not of the growth
    with MemoryWatch() as watch:
        fill(60)
        assert before[0] == 1
    assert 110 <= watch.largest_growth / MEBIBYTE < 160
    assert watch.total_growth == watch.largest_growth


SCRIPT = """
import subprocess, sys
from benchmarks.peak_memory import MemoryWatch
child = "content = b'x' * 100 * 2**20; import time; time.sleep(2)"
with MemoryWatch() as watch:
    children = [subprocess.Popen([sys.executable, "-c", child]) for _ in range(2)]
    assert all(child.wait() == 0 for child in children)
print(watch.largest_growth, watch.total_growth)
"""


@linux
def test_growth_of_processes_that_are_started():
    """Each one's own peak is found while it lives, and both are summed."""
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stdout
    largest, total = (int(number) / MEBIBYTE for number in printed.split())
    assert 80 < largest < 130 and 1.8 * largest < total < 2.5 * largest


def write_process(folder, process, parent, peak=None, name="python"):
    """Files about a process as Linux has them under /proc."""
    (folder / str(process)).mkdir()
    (folder / str(process) / "stat").write_text(f"{process} ({name}) S {parent} 1 1 0 -1")
    field = "" if peak is None else f"VmHWM:\t  {peak} kB\n"
    (folder / str(process) / "status").write_text(f"Name:\t{name}\n{field}VmRSS:\t   40 kB\n")


def test_memory_and_processes_are_read_as_linux_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(peak_memory, "PROCESSES", str(tmp_path))
    write_process(tmp_path, 10, 1, peak=70)
    write_process(tmp_path, 30, 10)
    write_process(tmp_path, 31, 30, name="a (child) S 7 7")  # of a child
    write_process(tmp_path, 12, 10)
    write_process(tmp_path, 13, 1)
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "99").mkdir()  # it has ended meanwhile
    assert peak_memory.find_descendants(10) == [12, 30, 31]
    assert peak_memory.find_descendants(13) == []
    assert read_memory(10, "VmHWM") == 70 * 1024 and read_memory(10, "VmRSS") == 40 * 1024
    assert read_memory(12, "VmHWM") is None and read_memory(99, "VmRSS") is None


def test_growth_is_above_the_base_and_each_process_counts_at_its_own_peak(monkeypatch):
    """A process that ends before the others, one below the base, and this one, looked at once more."""
    peaks = {
        "first": iter([500, 900, None, None]),
        "second": iter([700, 700, 650, 400]),
        "small": iter([50] * 4),
    }
    own = iter([300, 1000])
    fields = []

    def read(process, field):
        fields.append(field)
        return next(peaks.get(process, own))

    monkeypatch.setattr(peak_memory, "read_memory", read)
    monkeypatch.setattr(MemoryWatch, "_look_until_over", lambda watch: None)
    watch = MemoryWatch()
    watch.__enter__()
    for _ in range(4):
        watch._look(list(peaks))
    watch.__exit__()
    assert fields == ["VmRSS", *["VmHWM"] * 13]
    assert (watch.largest_growth, watch.total_growth) == (700, 600 + 400 + 0 + 700)


def test_elsewhere_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(peak_memory, "PROCESSES", str(tmp_path))
    with MemoryWatch() as watch:
        fill(1)
    assert watch.largest_growth is None and watch.total_growth is None
