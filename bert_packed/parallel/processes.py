"""The processes of a run: the first writes and decides, and all end together.

Decisions are shared by collectives of the backend, whose service watches all processes. When one is lost, the
service ends the others, or their next collective fails. A run writes each file whole or not at all, so that
it may end at any time.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time

import numpy as np

from bert_packed.core.command_line import STATUS_INTERRUPTED
from bert_packed.core.settings import InputError

STATUS_LOST = 75  # EX_TEMPFAIL of sysexits.h: the same command may well succeed
HEARTBEAT_SECONDS = 20  # a process that is silent for longer counts as lost
NOT_YET_SECONDS = 60  # a collective may fail after half an hour (Gloo); a decision may take longer
GRACE_SECONDS = 3  # the first process ends last, since the service and its sockets end with it
MISTAKES = (InputError, OSError, MemoryError, KeyboardInterrupt)  # commands report these in one line
SHOWN = 300  # characters of the backend's message about a loss


class Alone:
    """The only process of a run.

    Attributes:
        index: Number of this process, from 0.
        num: Number of processes.
        strategy: `tf.distribute.Strategy` over all of them, or None.
    """

    index, num, strategy = 0, 1, None

    @property
    def is_first(self):
        """True in the process that writes."""
        return self.index == 0

    def first_decides(self, decide):
        """Call `decide()` in the first process, while the others wait; returns its plain JSON in all of them.

        An `InputError`, `OSError` or `MemoryError` of `decide` becomes an `InputError` in the others.
        """
        return decide()

    def say(self, text):
        """Print in the first process only."""
        if self.is_first:
            print(text, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


ALONE = Alone()


class Processes(Alone):
    """The processes of a cluster: a context manager that ends this one if another is lost.

    Args:
        index, num: Number of this process, and of all, as in `Alone`.
        service: Service of the backend, connected. `share(numbers)` returns the first's float32 array
            in all; `is_loss(error)` is True for errors that a lost process causes; `leave(together)`
            disconnects; `strategy` is as in `Alone`.
    """

    def __init__(self, index, num, service):
        self.index, self.num, self.strategy = index, num, service.strategy
        self._service = service

    def first_decides(self, decide):
        if not self.is_first:
            content = json.loads(self._receive())
            if "error" in content:
                raise InputError(content["error"])
            return content["value"]
        try:
            with self._others_waiting():
                value = decide()
        except (InputError, OSError, MemoryError) as error:
            self._send(json.dumps({"error": one_line(error)}))
            raise
        self._send(json.dumps({"value": value}))
        return value

    def __exit__(self, kind, error, _):
        if error is None:
            self._service.share(np.zeros(1, np.float32))
            self._service.leave(together=True)
        elif not issubclass(kind, MISTAKES) and self._service.is_loss(error):
            end_lost(f"another process was lost: {one_line(error)[:SHOWN]}")
        else:
            self._service.leave(together=False)
            # A normal exit would wait for the others, which wait for this process
            status = STATUS_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 2
            atexit.register(self._end_at_once, status if issubclass(kind, MISTAKES) else 1)

    def _end_at_once(self, status):
        if self.is_first:
            time.sleep(GRACE_SECONDS)  # others may be about to end by the same error
        _exit(status)

    def _send(self, text):
        content = np.frombuffer(text.encode(), np.uint8).astype(np.float32)
        self._service.share(np.array([len(content)], np.float32))
        self._service.share(content)

    def _receive(self):
        while not (length := int(self._service.share(np.zeros(1, np.float32))[0])):
            pass  # not yet
        return self._service.share(np.zeros(length, np.float32)).astype(np.uint8).tobytes().decode()

    @contextlib.contextmanager
    def _others_waiting(self):
        """Send the others "not yet" while the body runs, before their collective would time out."""
        is_over = threading.Event()

        def repeat():
            while not is_over.wait(NOT_YET_SECONDS):
                self._service.share(np.zeros(1, np.float32))

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def end_lost(reason):
    """End this process, with one line, because another one is lost."""
    program = os.path.basename(sys.argv[0])
    sys.stderr.write(f"{program}: {reason}; the same commands continue from the last checkpoint\n")
    _exit(STATUS_LOST)


def one_line(error):
    """The message of an exception without line breaks."""
    return " ".join((str(error) or type(error).__name__).split())


def _exit(status):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
