"""A cluster on this machine: the same training command in several processes, and what befalls them."""

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # no process of a test takes longer, on any machine
# A process has one device: the tests' own settings may have more
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def free_ports(num):
    """Ports of this machine that nobody listened at a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [one.getsockname()[1] for one in sockets]


class RunningCluster:
    """The processes of one command, which write what they say to files of a folder.

    Args:
        folder: Folder for `out-0`, `err-0`, ...
        arguments: Arguments of `run_pretraining.py`.
        num: Number of processes.
        backend: "tensorflow" or "jax".
        own: Dict from the index of a process to arguments that it alone has, last.
        program: Arguments of Python that name the command, in place of `run_pretraining.py`.
        hosts: A `benchmarks.two_hosts.Host` for each process; None for this one.
    """

    def __init__(
        self, folder, arguments, num, backend, own=None, program=(ROOT / "run_pretraining.py",), hosts=None
    ):
        self.folder, self.num, self._hosts = Path(folder), num, hosts
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [host.address for host in hosts] if hosts else ["127.0.0.1"] * num
        self.addresses = [f"{name}:{port}" for name, port in zip(names, free_ports(num), strict=True)]
        own, self._program = own or {}, [str(part) for part in program]
        self.processes = [
            self._start(index, [*arguments, *own.get(index, [])], backend) for index in range(num)
        ]

    def _start(self, index, arguments, backend):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": self.addresses}, "task": task})
        with (self.folder / f"out-{index}").open("w") as out, (self.folder / f"err-{index}").open("w") as err:
            command = [sys.executable, *self._program, *arguments]
            return subprocess.Popen(
                self._hosts[index].command(command) if self._hosts else command,
                env={**os.environ, **ENVIRONMENT, "KERAS_BACKEND": backend, "TF_CONFIG": config},
                stdout=out,
                stderr=err,
            )

    def wait_for(self, condition):
        """Wait until `condition()`; fails where a process ends before."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.02)

    def send(self, index, number):
        self.processes[index].send_signal(number)

    def statuses(self, seconds=SECONDS):
        """Wait until all have ended: list of exit statuses, negative for a signal."""
        return self.wait_for_end(range(self.num), seconds)

    def wait_for_end(self, indices, seconds=SECONDS):
        """Wait until some have ended: list of their exit statuses, negative for a signal."""
        deadline = time.monotonic() + seconds
        try:
            return [self.processes[index].wait(max(0.1, deadline - time.monotonic())) for index in indices]
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def err(self, index):
        """The lines on standard error, without those of a progress bar."""
        return (self.folder / f"err-{index}").read_text().splitlines()

    def out(self, index):
        return (self.folder / f"out-{index}").read_text()

    def said(self):
        return {index: (self.out(index)[-2000:], self.err(index)[-20:]) for index in range(self.num)}


def last_step(output_dir):
    """The last step in the log of a run; 0 without one."""
    path = Path(output_dir) / "metrics.csv"
    if not path.exists():
        return 0
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return int(rows[-1]["step"]) if rows else 0
