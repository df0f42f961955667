"""Beam's portable job service and Dask, each with workers as processes of this machine.

This file alone catches what works in the process of the DirectRunner only: steps that do not travel, or that
an engine takes for something else, and workers that are lost, for which the portable one waits for ever.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cluster import free_ports
from crash import all_bytes
from unpacked_records import make_features, write_features

from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Beam's own are not ours to fix
    pytest.mark.skipif(importlib.util.find_spec("apache_beam") is None, reason="needs the extra `beam`"),
]
HAS_DASK = importlib.util.find_spec("distributed") is not None
NEEDS_DASK = pytest.mark.skipif(not HAS_DASK, reason="needs the extra `dask`")
ENGINES = ["PortableRunner", pytest.param("DaskRunner", marks=NEEDS_DASK)]
S = 128


class Engine:
    """Running services of an engine, and the options by which Beam finds them."""

    def __init__(self, name, folder):
        self.folder, self.processes = folder, []
        first, second = free_ports(2)
        if name == "DaskRunner":
            self.start("distributed.cli.dask_scheduler", f"--port={first}", "--no-dashboard")
            for _ in range(2):
                address = f"tcp://127.0.0.1:{first}"
                self.start("distributed.cli.dask_worker", address, "--nthreads=1", "--no-nanny")
            self.options = f"--dask_client_address={address} --dask_partition_size=1"
            self.worker = "dask_worker"
        else:
            self.start("apache_beam.runners.portability.local_job_service_main", f"--port={first}")
            self.start("apache_beam.runners.worker.worker_pool_main", f"--service_port={second}")
            external = f"--environment_type=EXTERNAL --environment_config=127.0.0.1:{second}"
            self.options = f"--job_endpoint=127.0.0.1:{first} {external}"
            self.worker = "SdkHarness"

    def start(self, module, *arguments):
        with (self.folder / f"said-{len(self.processes)}").open("w") as said:
            command = [sys.executable, "-m", module, *arguments]
            # One group: a pool has processes of its own
            self.processes.append(
                subprocess.Popen(command, stdout=said, stderr=said, cwd=self.folder, start_new_session=True)
            )

    def workers(self):
        """Process ids of the workers, of any generation below the services."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                is_own = os.getsid(int(name)) in [process.pid for process in self.processes]
                with open(f"/proc/{name}/cmdline") as file:
                    if is_own and self.worker in file.read():
                        found.append(int(name))
        return sorted(found)

    def stop(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def start(tmp_path, monkeypatch):
    started = []

    def of(name):
        (tmp_path / "engine").mkdir(exist_ok=True)
        started.append(Engine(name, tmp_path / "engine"))
        monkeypatch.setenv("BEAM_OPTIONS", started[-1].options)
        time.sleep(10)  # until they listen
        return started[-1]

    yield of
    for engine in started:
        engine.stop()


@pytest.mark.parametrize("runner", ENGINES)
def test_the_bytes_are_those_of_local_processes(tmp_path, jobs, start, runner):
    start(runner)
    for name in ("create", "pack"):
        assert jobs[name].run(tmp_path / name, num_workers=0, runner=runner) == jobs[name].bytes


@pytest.mark.parametrize("runner", ENGINES)
def test_a_worker_that_is_killed_inside_a_step(tmp_path, start, monkeypatch, runner):
    """Dask gives its step to the other worker; from the portable service the same command continues."""
    from data_gen.jobs import beam_runner

    monkeypatch.setattr(beam_runner, "ALIVE_SECONDS", 0.2)
    monkeypatch.setattr(beam_runner, "LOST_SECONDS", 12)  # workers say every 5 that they live
    rng = np.random.default_rng(0)
    write_features(tmp_path / "in.tfrecord", make_features(rng.integers(5, S + 1, 20_000), S))
    config = {"input_file": f"{tmp_path}/in.tfrecord", "max_seq_length": S, "num_shards": 2}
    pack(PackConfig(**config, output_dir=f"{tmp_path}/local", num_workers=1))
    engine, killed = start(runner), []
    read_sign = beam_runner._read_sign

    def kill_then_read(folder, sign):
        if not killed and engine.workers():
            killed.append(engine.workers()[0])
            os.kill(killed[0], signal.SIGKILL)
        return read_sign(folder, sign)

    monkeypatch.setattr(beam_runner, "_read_sign", kill_then_read)
    out = PackConfig(**config, output_dir=f"{tmp_path}/out", num_workers=0, runner=runner)
    if runner == "PortableRunner":
        with pytest.raises(OSError, match="PortableRunner failed: OSError: a worker was lost: no sign of li"):
            pack(out)
        engine.stop()
        start(runner)
    pack(out)
    assert killed and all_bytes(tmp_path / "out") == all_bytes(tmp_path / "local")
