"""A cluster on this machine: the same training command in several processes, or on two hosts."""

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # no process of a test takes longer, on any machine
NAMESPACES = Path("/etc/netns")  # what `ip netns exec` mounts over /etc
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
        program: Arguments of Python that name the command.
        hosts: A `Host` for each process; None for this one.
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


@dataclasses.dataclass
class Host:
    """A network namespace with its own name, address, and file of hosts."""

    name: str
    address: str

    def command(self, arguments):
        """The command that runs another one on this host."""
        within = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *within, *map(str, arguments)]

    def cut(self):
        """Pull the cable out at this end."""
        _ip("-n", self.name, "link", "set", "cable", "down")


@contextlib.contextmanager
def two_hosts():
    """Two `Host`s with a cable between them, gone afterwards."""
    key = uuid.uuid4().hex[:6]
    hosts = [Host(f"host-{key}-{number}", f"10.77.0.{number + 1}") for number in range(2)]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            (NAMESPACES / host.name).mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{one.address} {one.name}" for one in hosts)]
            (NAMESPACES / host.name / "hosts").write_text("\n".join(lines) + "\n")
        ends = [arguments for host in hosts for arguments in ("name", "cable", "netns", host.name)]
        _ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            shutil.rmtree(NAMESPACES / host.name, ignore_errors=True)


def reason_against_two_hosts():
    """Why there can be no hosts here; "" where there can."""
    try:
        with two_hosts() as (one, _):
            subprocess.run(one.command(["true"]), check=True, capture_output=True)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"namespaces need root, ip and unshare: {error}"
    return ""


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
