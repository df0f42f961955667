"""The processes of a run: the first writes and decides, and all end together.

Decisions are shared by collectives of the backend. Each process keeps a connection to the first, by which it
says that it lives; when one is lost, its silence ends the others. A run writes each file whole or not at all,
so that it may end at any time.
"""

import atexit
import contextlib
import json
import os
import select
import sys
import threading
import time

import numpy as np

from bert_packed.core.command_line import STATUS_INTERRUPTED
from bert_packed.core.runtime import repeating
from bert_packed.core.settings import InputError

STATUS_LOST = 75  # EX_TEMPFAIL of sysexits.h: the same command may well succeed
ALIVE_SECONDS = 2  # between two signs of life
SILENT_SECONDS = 15  # a process that is silent for longer counts as lost
ALIVE, DONE, LEAVING, LOST = "alive", "done", "leaving", "lost"  # lines that processes send each other
NOT_YET = np.zeros(1, np.int32)  # in place of a decision's length
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
        service: Service of the backend, connected. `share(numbers)` returns the first's array of integers in
            all; `is_loss(error)` is True for errors that a lost process causes; `leave(together)`
            disconnects; `strategy` is as in `Alone`.
        watch: `Watch` of this process.
    """

    def __init__(self, index, num, service, watch):
        self.index, self.num, self.strategy = index, num, service.strategy
        self._service, self._watch = service, watch

    def first_decides(self, decide):
        if not self.is_first:
            content = json.loads(self._receive())
            if "error" in content:
                raise InputError(content["error"])
            return content["value"]
        try:
            # The others hear "not yet" before their collective would time out
            with repeating(lambda: self._service.share(NOT_YET), NOT_YET_SECONDS):
                value = decide()
        except (InputError, OSError, MemoryError) as error:
            self._send(json.dumps({"error": one_line(error)}))
            raise
        self._send(json.dumps({"value": value}))
        return value

    def __exit__(self, kind, error, _):
        if error is None:
            self._watch.say(DONE)
            self._service.share(NOT_YET)
            self._watch.stop()
            self._service.leave(together=True)
        elif not issubclass(kind, MISTAKES) and self._service.is_loss(error):
            time.sleep(SILENT_SECONDS)  # the watch will know which one, and end this process first
            end_lost(f"another process was lost: {one_line(error)[:SHOWN]}")
        else:
            self._watch.leave()
            self._service.leave(together=False)
            # A normal exit would wait for the others, which wait for this process
            status = STATUS_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 2
            atexit.register(self._end_at_once, status if issubclass(kind, MISTAKES) else 1)

    def _end_at_once(self, status):
        if self.is_first:
            time.sleep(GRACE_SECONDS + 1)  # others may be about to end by the same error
        _exit(status)

    def _send(self, text):
        content = text.encode()
        # JAX compiles a program for each length; JSON may end in spaces
        content = content.ljust(1 << len(content).bit_length())
        self._service.share(np.array([len(content)], np.int32))
        self._service.share(np.frombuffer(content, np.uint8))

    def _receive(self):
        while not (length := int(self._service.share(NOT_YET)[0])):
            pass
        return self._service.share(np.zeros(length, np.uint8)).tobytes()


class Watch:
    """A thread that ends this process where one that it is connected with is lost.

    Args:
        addresses: Addresses of all processes, for messages.
        connections: Dict from a process's index to a connected socket: of the first process to all others, of
            each of these to the first, which passes on whom it has lost.
    """

    def __init__(self, addresses, connections):
        self._addresses, self._connections = addresses, dict(connections)
        self._is_over = threading.Event()
        for connection in self._connections.values():
            connection.setblocking(False)
        threading.Thread(target=self._watch, daemon=True).start()

    def say(self, line):
        """Send all others a line; one that is not there does not get it."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def leave(self):
        """Tell the others that this process ends because of an error, and watch no more."""
        self.say(LEAVING)
        self.stop()

    def stop(self):
        """Watch no more; the connections stay until this process ends."""
        self._is_over.set()

    def _watch(self):
        others, heard, next_sign = dict(self._connections), {}, 0.0
        while others and not self._is_over.is_set():
            if time.monotonic() >= next_sign:
                self.say(ALIVE)
                next_sign = time.monotonic() + ALIVE_SECONDS
            wait = max(next_sign - time.monotonic(), 0)
            readable, _, _ = select.select(list(others.values()), [], [], wait)
            now = time.monotonic()
            for index, connection in list(others.items()):
                lines = _received(connection) if connection in readable else []
                if lines or index not in heard:
                    heard[index] = now
                if lines is None or now - heard[index] > SILENT_SECONDS:
                    self._end(index, "was lost")
                elif DONE in lines:  # its part is over, whatever becomes of it
                    del others[index]
                elif lost := [line for line in lines if line.startswith(LOST)]:
                    self._end(int(lost[0].split()[1]), "was lost")
                elif LEAVING in lines:
                    self._is_over.wait(GRACE_SECONDS)  # this process may be leaving by the same error
                    self._end(index, "has ended")

    def _end(self, index, what):
        if not self._is_over.is_set():
            self.say(f"{LOST} {index}")
            end_lost(f"worker {index} ({self._addresses[index]}) {what}")


def _received(connection):
    """Lines that have come; None where the other end is gone."""
    try:
        content = connection.recv(1 << 16)
    except BlockingIOError:
        return []
    except OSError:
        return None
    return content.decode(errors="replace").split("\n") if content else None


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
