"""The cluster's service under JAX: the one of `jax.distributed`, which the first process hosts.

As `jax.distributed.initialize` sets it up (jax/_src/distributed.py of JAX 0.10), but for two things that it
offers no argument for: who is lost is asked for instead of aborting everybody (`recoverable`), and what its
client calls where the service itself is lost is ours instead of a page of log and an abort.
"""

import contextlib
import ctypes
import os

import jax
import numpy as np
from jax._src.distributed import global_state
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SECONDS_TO_LEAVE = 3
ANSWER_SECONDS = 2


class JaxService:
    """See `Processes`."""

    strategy = None

    def __init__(self, num, client):
        self.on_lost = None
        self._client = client
        self._tasks = list(range(num))
        self._incarnations = {}

    def set(self, key, value):
        self._client.key_value_set(key, value)

    def get(self, key, seconds):
        return self._client.blocking_key_value_get(key, int(seconds * 1000))

    def wait(self, name, seconds):
        self._client.wait_at_barrier(name, int(seconds * 1000))

    def find_lost(self):
        """Waits for all that live, or are not known to be lost yet, to ask the same."""
        try:
            found = self._client.get_live_nodes(self._tasks)
        except jax.errors.JaxRuntimeError:  # late, or the service is gone and with it the first process
            return [] if self.answers() else [0]
        known = self._incarnations = self._incarnations or found
        # A process that was started anew is not the one that was lost
        return [index for index in self._tasks if index not in found or found[index] != known.get(index)]

    def answers(self):
        """Whether the service is there."""
        try:
            self.get("here", ANSWER_SECONDS)  # with a limit, which no other call has
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def leave(self, is_first):
        self._client.shutdown()
        if is_first:
            # Kept while the others take their leave, or learn why there is nothing more to do
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.get("never set", SECONDS_TO_LEAVE)


def connect(cluster, seconds, heartbeat_seconds):
    """Host the service, in the first process, and connect with it.

    Args:
        cluster: `Cluster`.
        seconds: How long to wait for all.
        heartbeat_seconds: A process that gives no sign of life for so long is lost.

    Raises:
        InputError: a process is not there in time, or the port is taken.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM, by which a run is asked to save and stop
    jax.config.update("jax_enable_preemption_service", False)
    num, address = len(cluster.addresses), cluster.addresses[0]
    service = None

    def lost_the_service(*_):
        if service is None or service.on_lost is None or service.answers():
            os.abort()  # nothing to do with the cluster, or nobody there yet to tell it well
        service.on_lost(0)

    _call_where_c_terminates(lost_the_service)
    if cluster.index == 0:
        port = address.rpartition(":")[2]
        try:
            global_state.service = _jax.get_distributed_runtime_service(
                f"[::]:{port}", num, heartbeat_timeout=heartbeat_seconds, recoverable=True
            )
        except RuntimeError as error:
            raise cluster.not_up(seconds, f"port {port} of this machine is taken.") from error
    client = _jax.get_distributed_runtime_client(
        address,
        cluster.index,
        init_timeout=seconds,
        heartbeat_timeout=heartbeat_seconds,
        missed_heartbeat_callback=lost_the_service,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    try:
        client.connect()  # waits for all
    except RuntimeError as error:
        raise cluster.not_up(seconds, "fewer, or no way to the first.") from error
    global_state.client, global_state.coordinator_address = client, address
    global_state.process_id, global_state.num_processes = cluster.index, num
    _shake_hands(client, seconds)
    if cluster.index == 0:
        client.key_value_set("here", "")
    service = JaxService(num, client)  # which the callback knows from here on
    return service


def _shake_hands(client, seconds):
    """Let the collectives of all devices find each other, while all processes are there.

    Gloo gives that 30 seconds, and no more if the first collective were in a step that one process compiles
    for longer than another. Later ones wait for as long as it takes.
    """
    devices = jax.devices()
    client.wait_at_barrier("shake hands", int(seconds * 1000))
    mesh = Mesh(np.array(devices), ("all",))
    ones = jax.make_array_from_callback(
        (len(devices),), NamedSharding(mesh, PartitionSpec("all")), lambda _: np.ones(1, np.float32)
    )
    total = jax.jit(lambda values: values.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(ones)
    assert int(total) == len(devices)


HANDLERS = []  # C keeps no reference


def _call_where_c_terminates(function):
    """Call a function instead of aborting where an exception of C++ is caught by nobody.

    The client's callback gets a status of C++ that jaxlib cannot turn into a Python object: the conversion
    throws, in a thread of C++, before the callback is called.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):  # not Linux: it aborts with two lines of C++'s
        return
    HANDLERS.append(ctypes.CFUNCTYPE(None)(function))
    set_terminate(HANDLERS[-1])
