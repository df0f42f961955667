"""Stopping a run by signals: the first after the current step, the second at once.

In the first step of a call, which compiles and may take minutes, SIGTERM ends the process at once, as it does
before the loop. Ctrl-C does not: a program that calls `pretrain` may have more to lose.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE = 1.0  # seconds; schedulers and shells may send what is meant as one signal twice


class StopRequest:
    """Notes the first SIGTERM or SIGINT while the loop runs; a second, `GRACE` later, ends the process.

    Several processes stop together, at the same step: each passes its request to the next step, which counts
    the requests of all.

    Attributes:
        signal: Number of the first signal that this process got, or None.
        costs_nothing: True while the end of the process would lose no step. Then a signal that would end it
            outside the loop does so here.
    """

    def __init__(self, costs_nothing=False):
        self.signal = None
        self.costs_nothing = costs_nothing

    @contextlib.contextmanager
    def watching(self):
        """Context manager that watches for signals while its body runs; in another thread it does nothing."""
        if threading.current_thread() is not threading.main_thread():  # Python lets no other set handlers
            yield self
            return
        # Python's handlers wait until compiled code returns, and a step of a large model may take hours. So
        # the C handler writes each signal's number into a socket, and a thread counts them meanwhile
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # An ignored SIGINT stays ignored: shells without job control start `command &` in this way, and a
        # Ctrl-C at their terminal is meant for others
        watched = [number for number in SIGNALS if number == signal.SIGTERM or not _is_ignored(number)]
        before = {number: signal.signal(number, self._note) for number in watched}
        fatal = {number for number, handler in before.items() if handler == signal.SIG_DFL}
        fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reader, fatal), daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()
            watcher.join()
            reader.close()

    def agreed(self, num_requests):
        """The signal that stops the run after a step, or None.

        Args:
            num_requests: Number of processes that requested it when the step began; None for a run of one
                process, where a signal during the step counts too.
        """
        if num_requests is None:
            return self.signal
        return (self.signal or signal.SIGTERM) if num_requests else None

    def _note(self, number, _):
        self.signal = number

    def _watch(self, reader, fatal):
        """Read signal numbers, a byte each, until the other end is closed; say what each does, or end."""
        first = None
        while numbers := reader.recv(1):
            if numbers[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if self.costs_nothing and numbers[0] in fatal:
                _end(
                    numbers[0], "stopped in the first step, where nothing is lost; the same command continues"
                )
            elif first is None:
                first = now
                _say("stops as soon as a step is over and saved; a second signal stops at once")
            elif now - first > GRACE:
                _end(numbers[0], "stopped at once; the same command continues from the last checkpoint")


def _is_ignored(number):
    return signal.getsignal(number) is signal.SIG_IGN


def _end(number, text):
    # An end is safe at any time: a run writes each file whole or not at all, and the system frees its locks
    _say(text)
    os._exit(128 + number)


def _say(text):
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
