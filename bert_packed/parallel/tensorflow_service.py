"""The cluster's service under TensorFlow: the coordination service of `MultiWorkerMirroredStrategy`.

The strategy reads `TF_CONFIG` by itself and starts a server in every process; the first one hosts the
service, which is set up here: by itself, the strategy would wait for hours.
"""

import socket
import time

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.eager.context import context

TASK = "/job:worker/replica:0/task:{}"
ANSWER_SECONDS = 5
SECONDS_TO_LEAVE = 3
WATCH_SECONDS = 0.5  # between tries to reach a server


class TensorFlowService:
    """See `Processes`."""

    def __init__(self, cluster, strategy, heartbeat_seconds):
        self.on_lost = None
        self.strategy = strategy
        self._others = [index for index in range(len(cluster.addresses)) if index != cluster.index]
        self._heartbeat_seconds = heartbeat_seconds
        self._silent_since = {}

    def set(self, key, value):
        context().set_config_key_value(key, value)

    def get(self, key, seconds):
        return context().get_config_key_value(key, int(seconds * 1000))

    def wait(self, name, seconds):
        context().wait_at_barrier(name, int(seconds * 1000))

    def find_lost(self):
        """Asks each server for a sign of life; where nobody listens any more, once is enough."""
        lost = []
        for index in self._others:
            try:
                context().check_collective_ops_peer_health(
                    TASK.format(index), timeout_in_ms=ANSWER_SECONDS * 1000
                )
                self._silent_since.pop(index, None)
            except tf.errors.FailedPreconditionError:  # another process answers in its place
                lost.append(index)
            except tf.errors.OpError as error:
                silent = time.monotonic() - self._silent_since.setdefault(index, time.monotonic())
                if "Connection refused" in error.message or silent > self._heartbeat_seconds:
                    lost.append(index)
        return lost

    def leave(self, is_first):
        """A server ends with its process; the first stays while others take their leave."""
        if is_first:
            time.sleep(SECONDS_TO_LEAVE)


def connect(cluster, seconds, heartbeat_seconds):
    """Start the servers of a cluster, and the strategy that spans them.

    Args:
        cluster: `Cluster`.
        seconds: How long to wait for all.
        heartbeat_seconds: A process that gives no sign of life for so long is lost.

    Raises:
        InputError: a process is not there in time, or the port is taken.
    """
    num = len(cluster.addresses)
    if cluster.index == 0:
        _wait_for_servers(cluster, seconds)
    context().configure_coordination_service(
        "standalone",
        service_leader=TASK.format(0),
        cluster_register_timeout_in_ms=seconds * 1000,
        heartbeat_timeout_in_ms=heartbeat_seconds * 1000,
        coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=num)],
    )
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        context().wait_at_barrier("start", seconds * 1000)
    except (tf.errors.OpError, RuntimeError) as error:
        raise cluster.not_up(seconds, " ".join(str(error).split())) from error
    return TensorFlowService(cluster, strategy, heartbeat_seconds)


def _wait_for_servers(cluster, seconds):
    """Wait, in the first process, until the others listen.

    Once it has begun, its own start waits for them without a limit, deaf to signals and to other threads.

    Raises:
        InputError: one does not listen in time.
    """
    deadline = time.monotonic() + seconds
    for index, address in enumerate(cluster.addresses[1:], 1):
        host, _, port = address.rpartition(":")
        while True:
            try:
                socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise cluster.not_up(seconds, f"no worker {index} at {address}: {error}.") from error
                time.sleep(WATCH_SECONDS)
