"""The service of each backend by which the processes of a cluster exchange numbers and watch one another."""

import re
import socket
import threading
import time

import numpy as np

from bert_packed.parallel.processes import GRACE_SECONDS, HEARTBEAT_SECONDS, end_lost

WATCH_SECONDS = 5.0  # between looks at the others' servers
ANSWER_SECONDS = 5.0
SHUTDOWN_SECONDS = 10
# Of the messages of JAX's errors, which are of one class
JAX_LOSSES = re.compile(r"Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


class JaxService:
    """See `Processes`. The service of `jax.distributed`, which the first process hosts.

    It aborts a process that it cannot reach, or whose others are lost, with words of its own.
    """

    strategy = None

    def __init__(self, cluster, seconds):
        """Connect; raises `InputError` where that is not possible."""
        import jax
        from jax.experimental import multihost_utils

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # It would take SIGTERM, by which a run is asked to save and stop
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
            )
            # Gloo lets the sockets of all devices find each other for 30 seconds and no more, which a first
            # collective in a step that one process compiles for longer than another would exceed
            multihost_utils.sync_global_devices("start")
        except (RuntimeError, ValueError) as error:
            raise cluster.not_up(seconds, f"{error}.") from error

    def share(self, numbers):
        # A program is compiled for each length
        padded = np.zeros(1 << (len(numbers) - 1).bit_length(), np.float32)
        padded[: len(numbers)] = numbers
        return np.asarray(self._multihost.broadcast_one_to_all(padded))[: len(numbers)]

    def is_loss(self, error):
        return isinstance(error, (RuntimeError, ValueError)) and bool(JAX_LOSSES.search(str(error)))

    def leave(self, together):
        if together:
            self._jax.distributed.shutdown()


class TensorFlowService:
    """See `Processes`. The coordination service of `MultiWorkerMirroredStrategy`, which the first hosts.

    The strategy reads `TF_CONFIG` by itself and starts a server in every process. A lost process fails the
    next exchange. In between, a thread sees whether the others' servers still listen.
    """

    def __init__(self, cluster, seconds):
        """Start the servers and the strategy; raises `InputError` where that is not possible."""
        import tensorflow as tf

        self._tf = tf
        self._leaving = threading.Event()
        try:
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        except (tf.errors.OpError, RuntimeError) as error:
            raise cluster.not_up(seconds, " ".join(str(error).split())) from error
        threading.Thread(target=self._watch, args=(cluster,), daemon=True).start()

    def share(self, numbers):
        def of_first(context):
            return numbers if context.replica_id_in_sync_group == 0 else np.zeros_like(numbers)

        values = self.strategy.experimental_distribute_values_from_function(
            lambda context: self._tf.constant(of_first(context))
        )
        return self.strategy.reduce("SUM", values, axis=None).numpy()

    def is_loss(self, error):
        errors = self._tf.errors
        return isinstance(
            error,
            (
                errors.UnavailableError,
                errors.AbortedError,
                errors.DeadlineExceededError,
                errors.CancelledError,
            ),
        )

    def leave(self, together):
        self._leaving.set()
        if together:
            time.sleep(GRACE_SECONDS)  # another may still fetch its part of the last exchange here

    def _watch(self, cluster):
        others = [pair for pair in enumerate(cluster.addresses) if pair[0] != cluster.index]
        while not self._leaving.wait(WATCH_SECONDS):
            for index, address in others:
                # Who ends by a mistake that all see ends in order here too
                if is_refused(address) and not self._leaving.wait(GRACE_SECONDS):
                    end_lost(f"worker {index} ({address}) was lost")


SERVICES = {"jax": JaxService, "tensorflow": TensorFlowService}


def is_refused(address):
    """Whether a host says that nobody listens at an address; False where it says nothing."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
