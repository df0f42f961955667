"""Training on two hosts over a link that delays: two network namespaces of one machine. Needs root and Linux.

python -m benchmarks.two_hosts --input_file='packed/*.tfrecord' --bert_config_file=bert_config.json \\
    --output_dir=hosts --delay_ms=0,50,200
"""

import contextlib
import csv
import dataclasses
import fcntl
import json
import os
import queue
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from benchmarks.runner import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.records.inputs import find_files
from bert_packed.records.record_rules import read_pack_spec

FOLDER = Path("/etc/netns")  # what `ip netns exec` mounts over /etc
PORT = 4711
WARM_UP = 5  # steps that compile or find connections
JOIN_SECONDS = 5  # for packets on their way
MAKE_TUNNEL = 0x400454CA, 0x1001  # the request TUNSETIFF, and IFF_TUN with IFF_NO_PI: bare packets


@dataclasses.dataclass(frozen=True)
class TwoHostsConfig(Settings):
    """Seconds of a training step on two hosts, for each delay of the link between them."""

    input_file: str = setting("", "packed records", required=True)
    bert_config_file: str = setting("", "the model", required=True)
    output_dir: str = setting("", "new folder for the runs", required=True)
    delay_ms: str = setting("0,50,200", "round trips of the link to try, in milliseconds")
    backends: str = setting("jax,tensorflow", "backends to try")
    batch_size: int = setting(8, "packs of a step", minimum=2)
    num_steps: int = setting(25, "steps of a run", minimum=WARM_UP + 2)


def main(config):
    """Measure, print and write."""
    if reason := reason_against():
        raise InputError(f"two hosts cannot be made on this machine: {reason}")
    rows = []
    for backend in config.backends.split(","):
        delays = sorted(map(float, config.delay_ms.split(",")))
        seconds = {delay: seconds_of_step(config, backend, delay) for delay in delays}
        for delay in delays:
            added, longer = seconds[delay] - seconds[delays[0]], delay - delays[0]
            rows.append(
                {
                    "backend": backend,
                    "round trip, ms": delay,
                    "seconds of a step": seconds[delay],
                    "added round trips": 1000 * added / longer if longer else None,
                }
            )
    show("two_hosts", config, {"two_hosts": rows})


def seconds_of_step(config, backend, delay):
    """Train on two hosts: the median seconds of a step after those of the warm-up."""
    output_dir = Path(config.output_dir) / f"{backend}-{delay:g}"
    flags = {
        "input_file": config.input_file,
        "bert_config_file": config.bert_config_file,
        "output_dir": output_dir.absolute(),
        "train_batch_size": config.batch_size,
        "num_train_steps": config.num_steps,
        "log_steps": 1,
        "distribution": "multi_worker",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    with two_hosts(delay / 1000) as pair:
        workers = [f"{host.address}:{PORT}" for host in pair]
        processes = []
        try:
            for index, host in enumerate(pair):
                task = {"type": "worker", "index": index}
                cluster = json.dumps({"cluster": {"worker": workers}, "task": task})
                command = host.command([sys.executable, "-m", "bert_packed", "pretrain", *arguments])
                variables = {**os.environ, "KERAS_BACKEND": backend, "TF_CONFIG": cluster}
                processes.append(subprocess.Popen(command, env=variables, stdout=sys.stderr))
            statuses = [process.wait() for process in processes]
        finally:  # an interrupt would leave them on hosts that are gone
            for process in processes:
                process.kill()
    if any(statuses):
        raise InputError(f"both processes must end with status 0. Received: {statuses}")
    with (output_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[WARM_UP:]
    spec = read_pack_spec(find_files(config.input_file, "input_file"))
    positions = config.batch_size * spec.max_seq_length
    return statistics.median(
        positions * float(row["packing_efficiency"]) / float(row["tokens_per_second"]) for row in rows
    )


def reason_against():
    """Why there can be no hosts here; "" where there can."""
    if os.geteuid():
        return "namespaces need root"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "namespaces need ip and unshare"
    try:
        with two_hosts() as (one, _):
            subprocess.run(one.command(["true"]), check=True, capture_output=True)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no namespaces here: {error}"
    return ""


class Host:
    """A namespace with its own name, address, and file of hosts."""

    def __init__(self, name, address):
        self.name, self.address = name, address

    def command(self, arguments):
        """The command that runs another one on this host."""
        within = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *within, *map(str, arguments)]

    def cut(self):
        """Pull the cable out at this end."""
        _ip("-n", self.name, "link", "set", "cable", "down")


@contextlib.contextmanager
def two_hosts(round_trip=0.0):
    """Two `Host`s with a cable between them, gone afterwards.

    Args:
        round_trip: Seconds that a packet and its answer take.
    """
    key = uuid.uuid4().hex[:6]
    hosts = [Host(f"host-{key}-{number}", f"10.77.0.{number + 1}") for number in range(2)]
    tunnels, carriers = [], []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            (FOLDER / host.name).mkdir(parents=True)
            lines = [f"{one.address} {one.name}\n" for one in hosts]
            (FOLDER / host.name / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        if round_trip:  # without netem, which few kernels of containers have
            tunnels = [_open_tunnel(host.name) for host in hosts]
            for ends in (tunnels, tunnels[::-1]):
                carriers.append(threading.Thread(target=_carry, args=(*ends, round_trip / 2), daemon=True))
                carriers[-1].start()
        else:
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
            shutil.rmtree(FOLDER / host.name, ignore_errors=True)
        for carrier in carriers:
            carrier.join(JOIN_SECONDS)
        if not any(carrier.is_alive() for carrier in carriers):  # or one would write to what gets its number
            for tunnel in tunnels:
                os.close(tunnel)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_tunnel(host):
    """The other end of a host's cable: a descriptor, of whose reads and writes each is a packet."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    request, kind = MAKE_TUNNEL
    name = f"t{uuid.uuid4().hex[:8]}"
    fcntl.ioctl(end, request, struct.pack("16sH22x", name.encode(), kind))
    _ip("link", "set", name, "netns", host, "name", "cable")
    return end


def _carry(source, target, seconds):
    """Hand each packet of one end to the other, late, until an end is gone."""
    packets = queue.SimpleQueue()

    def deliver():
        for due, packet in iter(packets.get, None):
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):  # the end is down, or gone
                os.write(target, packet)

    delivering = threading.Thread(target=deliver, daemon=True)
    delivering.start()
    with contextlib.suppress(OSError):
        while packet := os.read(source, 2**16):
            packets.put((time.monotonic() + seconds, packet))
    packets.put(None)
    delivering.join()


if __name__ == "__main__":
    sys.exit(run(main, TwoHostsConfig))
