"""Peak memory is that of each process itself, above what it began with, and only where the system tells."""

import subprocess
import sys

import numpy as np
import pytest

from bert_packed.reports import peak_memory
from bert_packed.reports.peak_memory import MemoryWatch, read_memory

MEBIBYTE = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell")


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
from bert_packed.reports.peak_memory import MemoryWatch
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


@linux
def test_a_small_program_does_not_look_as_large_as_its_parent():
    """What `ru_maxrss` gets wrong."""
    large = np.ones(300 * MEBIBYTE, np.uint8)
    code = (
        "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); "
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    _, own = map(int, printed.split())
    assert own * 1024 < 100 * MEBIBYTE < large.nbytes
    assert read_memory("self", "VmHWM") > large.nbytes


def test_elsewhere_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(peak_memory, "PROCESSES", str(tmp_path))
    with MemoryWatch() as watch:
        fill(1)
    assert watch.largest_growth is None and watch.total_growth is None
