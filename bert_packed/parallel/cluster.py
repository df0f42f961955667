"""How the processes of a cluster are described, under both backends, and how they find each other.

Every process has the same command and an environment variable of its own, as TensorFlow defined it:

    TF_CONFIG='{"cluster": {"worker": ["host-a:4711", "host-b:4711"]},
                "task": {"type": "worker", "index": 1}}'

The first worker's address is where the backend's coordination service listens; under TensorFlow every worker
listens at its own.
"""

import dataclasses
import importlib
import json
import os

from bert_packed.core.settings import InputError
from bert_packed.parallel.processes import ALONE, HEARTBEAT_SECONDS, Processes

DISTRIBUTIONS = ("none", "mirrored", "multi_worker", "tpu")
VARIABLE = "TF_CONFIG"
START_SECONDS = 300  # a process that is not there by then is not waited for
EXAMPLE = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'
# Backend -> module whose `connect` makes the service of `Processes`
SERVICES = {
    "tensorflow": "bert_packed.parallel.tensorflow_service",
    "jax": "bert_packed.parallel.jax_service",
}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
        addresses: `host:port` of each.
        index: Of this one.
    """

    addresses: tuple[str, ...]
    index: int

    def not_up(self, seconds, received):
        """The `InputError` of a cluster that has not come together within some seconds."""
        return InputError(
            f"all {len(self.addresses)} workers of the cluster, the first at {self.addresses[0]}, must come "
            f"up within {seconds} seconds. Received: {received}"
        )


def start(distribution, backend, seconds=START_SECONDS):
    """Meet the other processes of a run; before the backend computes anything.

    Args:
        distribution: As the flag. All but "multi_worker" have one process.
        backend: "tensorflow" or "jax".
        seconds: How long to wait for the others.

    Returns:
        `Processes`; `ALONE` where there is one.

    Raises:
        InputError: `TF_CONFIG` is missing or wrong, or a process does not come up in time.
    """
    if distribution != "multi_worker":
        return ALONE
    cluster = read_cluster(os.environ.get(VARIABLE, ""))
    service = importlib.import_module(SERVICES[backend]).connect(cluster, seconds, HEARTBEAT_SECONDS)
    return Processes(cluster, service)


def read_cluster(text):
    """The `Cluster` that a `TF_CONFIG` describes; raises `InputError`."""
    if not text:
        raise _error(f"hold {EXAMPLE} where distribution is multi_worker", "nothing")
    try:
        content = json.loads(text)
        addresses, task = content["cluster"]["worker"], content["task"]
        others = sorted(set(content["cluster"]) - {"worker"})
        kind, index = task["type"], task["index"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise _error(f"be JSON of the form {EXAMPLE}", text) from error
    if others or kind != "worker":
        raise _error("have tasks of type worker alone", others[0] if others else kind)
    if not isinstance(addresses, list) or not addresses or not all(map(_is_address, addresses)):
        raise _error('list the workers as "HOST:PORT"', addresses)
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        raise _error("name every worker once", f"{twice} twice")
    if isinstance(index, str) and index.isdecimal():  # as some schedulers write it
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(addresses):
        raise _error(f"have a task index from 0 and below the number of workers, {len(addresses)}", index)
    return Cluster(tuple(addresses), index)


def _is_address(address):
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _error(rule, received):
    return InputError(f"{VARIABLE} must {rule}. Received: {received}.")
