"""Memory that a compiled program, or a worker, frees is there for its next run, without the system."""

import os
import platform
import resource
import subprocess
import sys

import numpy as np
import pytest

from bert_packed.core import runtime as freed_memory
from data_gen.jobs.runners import start_workers

NUM_BYTES = 48 << 20  # more than the C library keeps by itself, 32 MiB
NUM_ARRAYS, ARRAY_BYTES = 6, 16 << 20
PROGRAM = f"""
import resource
from bert_packed.training.engines import choose_backend
choose_backend()
import numpy as np
from keras import ops
from bert_packed.training.backend import compiled
twice = compiled(lambda values: values * 2)
values = ops.convert_to_tensor(np.ones({NUM_BYTES // 4}, np.float32))
def run():
    float(twice(values)[-1])  # wait for the device
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # not their mean: on a busy machine a run may begin before the last one's memory is free
"""
is_glibc = platform.libc_ver()[0] == "glibc"


@pytest.mark.both_backends
def test_a_program_gets_its_memory_from_the_system_once():
    if not is_glibc:
        assert freed_memory.keep_freed_memory() is False
        return
    tuned = "GLIBC_TUNABLES", "MALLOC_"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tuned)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # The number is not 0: other threads of the libraries allocate as well
    assert int(done.stdout) < NUM_BYTES / resource.getpagesize() / 20


def faults_of_large_arrays():
    """Pages that the system brought in for arrays that were freed and are taken again, the least of some."""
    faults = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(ARRAY_BYTES, np.uint8) for _ in range(NUM_ARRAYS)]
        del arrays
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


def test_workers_keep_what_they_free():
    if not is_glibc:
        pytest.skip("another C library")
    with start_workers(1) as pool:
        faults = pool.submit(faults_of_large_arrays).result()
    assert faults < NUM_ARRAYS * ARRAY_BYTES / resource.getpagesize() / 20


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_settings_of_the_users_own_stay(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert freed_memory.keep_freed_memory() is False
