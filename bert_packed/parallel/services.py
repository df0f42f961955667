"""The coordination service of each backend, by which processes exchange numbers and detect losses."""

import re
import socket
import threading
import time

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.parallel.processes import GRACE_SECONDS, HEARTBEAT_SECONDS, end_lost

WATCH_SECONDS = 5.0  # between looks at the others' servers
ANSWER_SECONDS = 5.0
SHUTDOWN_SECONDS = 10
# JAX's errors all have the same class; their messages have one of these words
JAX_LOSSES = re.compile(r"Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")


class JaxService:
    """The service of `jax.distributed`, hosted by the first process; see `Processes`.

    It aborts a process that cannot reach it, or when another is lost, with its own message.
    """

    strategy = None

    def __init__(self, cluster, seconds):
        import jax
        from jax.experimental import multihost_utils

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # It would handle SIGTERM, which makes a run save and stop
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
    """The coordination service of `MultiWorkerMirroredStrategy`, hosted by the first process; see
    `Processes`.

    The strategy reads `TF_CONFIG` and starts a server in each process. If one is lost, the next collective
    fails; in between, a thread checks that the others' servers still listen.
    """

    def __init__(self, cluster, seconds):
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
                # A grace period: where all end by the same error, this process is leaving too
                if is_refused(address) and not self._leaving.wait(GRACE_SECONDS):
                    end_lost(f"worker {index} ({address}) was lost")


SERVICES = {"jax": JaxService, "tensorflow": TensorFlowService}


def is_refused(address):
    """True if a host refuses connections at an address; False where it does not answer."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
