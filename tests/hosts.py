"""Two hosts on one machine: network namespaces with a cable between them, which can be cut."""

import contextlib
import os
import shutil
import subprocess
import uuid
from pathlib import Path

FOLDER = Path("/etc/netns")  # what `ip netns exec` mounts over /etc


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
def two_hosts():
    """Two `Host`s, gone afterwards."""
    key = uuid.uuid4().hex[:6]
    hosts = [Host(f"host-{key}-{number}", f"10.77.0.{number + 1}") for number in range(2)]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            (FOLDER / host.name).mkdir(parents=True)
            lines = [f"{one.address} {one.name}\n" for one in hosts]
            (FOLDER / host.name / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
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


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
