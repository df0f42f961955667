"""Cluster of a run: its description in `TF_CONFIG`, rendezvous, and the backends' coordination services.

All processes run the same command, each with its own value of the environment variable:

    TF_CONFIG='{"cluster": {"worker": ["host-a:4711", "host-b:4711"]},
                "task": {"type": "worker", "index": 1}}'

The processes meet at the first worker's address, and stay connected with it, as `Watch` needs it. There the
backend's coordination service then listens; under TensorFlow every worker also listens at its own. No service
asks who calls.
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import socket
import time

from bert_packed.core.settings import InputError
from bert_packed.parallel.processes import ALONE, GRACE_SECONDS, Processes, Watch

DISTRIBUTIONS = ("none", "mirrored", "multi_worker", "tpu")
VARIABLE = "TF_CONFIG"
START_SECONDS = 300  # how long to wait for all processes
EXAMPLE = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'
ANSWER_SECONDS = 5.0
RETRY_SECONDS = 0.5
GO = b"go"
SHUTDOWN_SECONDS = 10
# JAX's service aborts processes with words of its own. Before it misses one, `Watch` has
HEARTBEAT_SECONDS = 60
# JAX's errors all have the same class; their messages have one of these words
JAX_LOSSES = re.compile(r"Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run."""

    addresses: tuple[str, ...]  # host:port of each
    index: int  # of this process

    def not_up(self, seconds, received):
        """The `InputError` of a cluster that is not complete in time."""
        return InputError(
            f"all {len(self.addresses)} workers of the cluster, the first at {self.addresses[0]}, must come "
            f"up within {seconds} seconds. Received: {received}"
        )

    def check_reachable(self, name, use):
        """Raise `InputError` where other machines take part, and a name of this one is a loopback address.

        Args:
            name: Name or address of this machine.
            use: Phrase that says what it is for.
        """
        own = host_of(self.addresses[self.index])
        if self.index and _is_loopback(own):  # all are on one machine
            return
        if all(host == own or _is_loopback(host) for host in map(host_of, self.addresses)):
            return
        try:
            received = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except (socket.gaierror, UnicodeError) as error:
            received = _reason(error)
        else:
            if not _is_loopback(received):
                return
            received += ", a loopback address"
        raise InputError(
            f"{name}, {use}, must have an address that other machines reach: give it one in this machine's "
            f"/etc/hosts. Received: {received}."
        )


def start(distribution, backend):
    """Connect the processes of a run, before the backend initialises its devices.

    Returns `Processes`, or `ALONE` unless `distribution` is "multi_worker". Raises `InputError` where
    `TF_CONFIG` is missing or wrong, or a process does not come up in time.
    """
    if distribution != "multi_worker":
        return ALONE
    cluster = read_cluster(os.environ.get(VARIABLE, ""))
    watch = Watch(cluster.addresses, meet(cluster, START_SECONDS))
    try:
        service = SERVICES[backend](cluster, START_SECONDS)
    except InputError:
        watch.leave()
        raise
    return Processes(cluster.index, len(cluster.addresses), service, watch)


def meet(cluster, seconds):
    """Wait until all processes are up: the connections of this one, by the index of the other.

    Each connects to the first one's address and sends its index; once all have, the first answers. Raises
    `InputError` for a missing one, or where the port is taken.
    """
    # The backend connects later: it would abort, or wait without a limit
    deadline, first = time.monotonic() + seconds, cluster.addresses[0]
    address = host_of(first), int(first.rpartition(":")[2])
    found = (_go_to_first if cluster.index else _hear_all)(cluster, address, deadline)
    if isinstance(found, str):
        raise cluster.not_up(seconds, found)
    return found


def _go_to_first(cluster, address, deadline):
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), contextlib.ExitStack() as on_failure:
            first = on_failure.enter_context(socket.create_connection(address, ANSWER_SECONDS))
            first.sendall(b"%d\n" % cluster.index)
            first.settimeout(max(deadline - time.monotonic(), 0.01))
            if first.recv(len(GO)) == GO:
                on_failure.pop_all()
                return {0: first}
        time.sleep(RETRY_SECONDS)
    return "fewer, or no way to the first."


def _hear_all(cluster, address, deadline):
    cluster.check_reachable(address[0], f"the first worker of {VARIABLE}")
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        # Other addresses must not reach it, since it does not ask who calls
        server = socket.create_server(address, family=family)
    except (OSError, UnicodeError) as error:
        return f"process 0 cannot listen there: {_reason(error)}."
    there = {}
    with server, contextlib.ExitStack() as connections:
        while missing := set(range(1, len(cluster.addresses))) - there.keys():
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = connections.enter_context(server.accept()[0])
            except TimeoutError:
                return f"no worker {min(missing)} at {cluster.addresses[min(missing)]}."
            with contextlib.suppress(OSError, ValueError):  # from other programs, such as port scanners
                connection.settimeout(ANSWER_SECONDS)
                there[int(connection.recv(16))] = connection
            # A process that has closed its connection may retry
            there = {index: one for index, one in there.items() if not _is_closed(one)}
        for connection in there.values():
            connection.sendall(GO)
        connections.pop_all()
    return there


def _is_closed(connection):
    """True if the other end, which sends nothing more, has closed the connection."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_cluster(text):
    """Parse a `TF_CONFIG`: `Cluster`; raises `InputError`."""
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


def host_of(address):
    """Host of an address `HOST:PORT`, an IPv6 one without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def _reason(error):
    """The text of an error of the system or of a host's name."""
    return getattr(error, "strerror", None) or str(error)


def _is_loopback(host):
    """True for a loopback address, and for the name that everywhere has one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(address):
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _error(rule, received):
    return InputError(f"{VARIABLE} must {rule}. Received: {received}.")


class JaxService:
    """The service of `jax.distributed`, hosted by the first process; see `Processes`.

    It aborts a process that cannot reach it, or when another is lost, with its own message.
    """

    strategy = None

    def __init__(self, cluster, seconds):
        import jax
        from jax.experimental import multihost_utils

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # The service would handle SIGTERM, which makes a run save and stop
        jax.config.update("jax_enable_preemption_service", False)
        self._jax, self._multihost = jax, multihost_utils
        try:
            jax.distributed.initialize(
                cluster.addresses[0],
                len(cluster.addresses),
                cluster.index,
                cluster_detection_method="deactivate",
                initialization_timeout=seconds,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
                coordinator_bind_address=cluster.addresses[0],  # by default it listens at all addresses
            )
            if jax.default_backend() == "cpu":
                use = "this machine's name, whose address Gloo gives to the other processes"
                cluster.check_reachable(socket.gethostname(), use)
            # Gloo connects the sockets of all devices at the first collective, within 30 seconds. In a step
            # that is too short: one process may compile it for much longer than another
            multihost_utils.sync_global_devices("start")
        except InputError:
            raise
        except (RuntimeError, ValueError) as error:
            raise cluster.not_up(seconds, f"{error}.") from error

    def share(self, numbers):
        return self._multihost.broadcast_one_to_all(numbers)

    def is_loss(self, error):
        return isinstance(error, (RuntimeError, ValueError)) and bool(JAX_LOSSES.search(str(error)))

    def leave(self, together):
        if together:
            self._jax.distributed.shutdown()


class TensorFlowService:
    """The coordination service of `MultiWorkerMirroredStrategy`, hosted by the first process; see
    `Processes`.

    The strategy reads `TF_CONFIG` and starts a server in each process.
    """

    def __init__(self, cluster, seconds):
        import tensorflow as tf

        self._tf = tf
        try:
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        except (tf.errors.OpError, RuntimeError) as error:
            raise cluster.not_up(seconds, " ".join(str(error).split())) from error

    def share(self, numbers):
        def part(context):
            # Collectives take no bytes. They take float32 on every device, as gradients are
            return self._tf.constant(numbers * (context.replica_id_in_sync_group == 0), self._tf.float32)

        values = self.strategy.experimental_distribute_values_from_function(part)
        return self.strategy.reduce("SUM", values, axis=None).numpy().astype(numbers.dtype)

    def is_loss(self, error):
        of = self._tf.errors
        losses = of.UnavailableError, of.AbortedError, of.DeadlineExceededError, of.CancelledError
        return isinstance(error, losses)

    def leave(self, together):
        if together:
            time.sleep(GRACE_SECONDS)  # another may still fetch its part of the last exchange here


SERVICES = {"jax": JaxService, "tensorflow": TensorFlowService}
