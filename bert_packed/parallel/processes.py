"""What a run asks of the processes that share it: who writes and decides, to wait, to end together.

A process that is lost takes the others with it. They may hang in compiled code, in a collective that never
returns, so that a thread watches the cluster and ends its own process: with one line and `STATUS_LOST`.
Whatever a run writes appears whole or not at all, so that it may end at any time.
"""

import contextlib
import json
import os
import sys
import threading
import time

from bert_packed.core.settings import InputError

STATUS_LOST = 75  # EX_TEMPFAIL of sysexits.h: the same command may well succeed
HEARTBEAT_SECONDS = 20  # without a sign of life for so long, a process counts as lost
WATCH_SECONDS = 1.0  # between looks at the cluster
GRACE_SECONDS = 2.0  # for those who are about to end in order, by an error that all of them see
DECISION_SECONDS = 7 * 24 * 3600  # the longest that anything may take; a lost process ends the wait
MISTAKES = (InputError, OSError, MemoryError, KeyboardInterrupt)  # what a command tells in one line


class Alone:
    """The one process of a run that is not shared: nobody to wait for, nobody to ask.

    Attributes:
        index: Number of this process, from 0.
        num: Processes that share the run.
        strategy: `tf.distribute.Strategy` over all of them, or None.
    """

    index, num, strategy = 0, 1, None

    @property
    def is_first(self):
        """Whether this process is the one that writes."""
        return self.index == 0

    def wait(self, name):
        """Wait until all processes have come to the same call; `name` says where, for errors."""

    def first_decides(self, decide):
        """What the first process finds out, everywhere.

        Args:
            decide: Called in the first process alone, without arguments; returns something JSON-able. The
                others wait until it has returned.

        Raises:
            InputError: with its message in all processes, where `decide` raised one, an `OSError` or a
                `MemoryError`; in the first the error itself.
        """
        return decide()

    def say(self, text):
        """Print for people, in the first process alone."""
        if self.is_first:
            print(text, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


ALONE = Alone()


class Processes(Alone):
    """The processes of a cluster; a context in which their loss is watched.

    Args:
        cluster: `Cluster`.
        service: The backend's own, already connected:
            `set(key, value)`, `get(key, seconds)`, which waits and raises where there is none, and
            `wait(name, seconds)`; `find_lost()`, the indices of lost processes; `leave(is_first)`.
            `on_lost` is what it calls with an index where it learns of a loss by itself.
    """

    def __init__(self, cluster, service):
        self.index, self.num, self.strategy = cluster.index, len(cluster.addresses), service.strategy
        self._cluster, self._service = cluster, service
        self._num_calls = 0  # the same everywhere: all run the same program
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        service.on_lost = self._end

    def wait(self, name):
        self._service.wait(f"{self._next_number()} {name}", DECISION_SECONDS)

    def first_decides(self, decide):
        key = f"decision {self._next_number()}"
        if not self.is_first:
            content = json.loads(self._service.get(key, DECISION_SECONDS))
            if "error" in content:
                raise InputError(content["error"])
            return content["value"]
        try:
            value = decide()
        except (InputError, OSError, MemoryError) as error:
            self._service.set(key, json.dumps({"error": _one_line(error)}))
            raise
        self._service.set(key, json.dumps({"value": value}))
        return value

    def __enter__(self):
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind, error, _):
        if kind is None:
            self.wait("the end")
        elif issubclass(kind, MISTAKES):
            with contextlib.suppress(Exception):  # the others may be gone, which changes nothing here
                self._service.set(f"ended {self.index}", _one_line(error))
        else:
            # A collective breaks at once where a process is lost; the service knows whose it was later
            time.sleep(HEARTBEAT_SECONDS + 3 * GRACE_SECONDS)
        self._leaving.set()
        with contextlib.suppress(Exception):
            self._service.leave(self.is_first)

    def _next_number(self):
        self._num_calls += 1
        return self._num_calls

    def _watch(self):
        while not self._leaving.wait(WATCH_SECONDS):
            for index in self._service.find_lost():
                self._end(index)

    def _end(self, index):
        """End this process because another is lost, unless it is about to end by itself."""
        if self._leaving.wait(GRACE_SECONDS) or not self._ending.acquire(blocking=False):
            threading.Event().wait()  # who called cannot go on; the main thread or another ends the process
        reason = "was lost"
        with contextlib.suppress(Exception):
            reason = "has ended: " + self._service.get(f"ended {index}", WATCH_SECONDS).rstrip(".")
        sys.stdout.flush()
        sys.stderr.write(
            f"{os.path.basename(sys.argv[0])}: worker {index} ({self._cluster.addresses[index]}) {reason}; "
            "the same commands continue from the last checkpoint\n"
        )
        sys.stderr.flush()
        if self.is_first:
            time.sleep(GRACE_SECONDS)  # the service is here: with it the others would lose the name
        os._exit(STATUS_LOST)


def _one_line(error):
    return " ".join((str(error) or type(error).__name__).split())
