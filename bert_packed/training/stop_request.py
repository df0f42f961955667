"""How a run is asked to stop: the first signal after the step under way, the second at once."""

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

    A step is one call into compiled code, of hours for a large model on a CPU, and Python's handlers wait
    until it returns. The second signal must not: Python's C handler writes every signal's number into a
    socket, and a thread, which runs beside the compiled code, counts them. Whatever a run writes appears
    whole or not at all, so that it may end at any time.

    A SIGINT that the process was started to ignore stays ignored, as everywhere in Python: shells without job
    control start `command &` so, and a Ctrl-C at their terminal is meant for others. SIGTERM stops always.

    Several processes of a run stop together: each hands its wish to the next step, which counts them, and all
    see the same number. So they save at the same step, the one after a signal.

    Attributes:
        signal: Number of the first signal that this process got, or None.
    """

    def __init__(self):
        self.signal = None

    @contextlib.contextmanager
    def watching(self):
        """Watch while the body runs; only in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        watched = [number for number in SIGNALS if number == signal.SIGTERM or not _is_ignored(number)]
        before = {number: signal.signal(number, self._note) for number in watched}
        fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watcher = threading.Thread(target=_end_at_second_signal, args=(reader,), daemon=True)
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
        """The signal by which the run stops after a step, or None.

        Args:
            num_requests: How many processes asked for it when the step began; None where the step does not
                count them: there is this process alone, and what it got during the step counts.
        """
        if num_requests is None:
            return self.signal
        return (self.signal or signal.SIGTERM) if num_requests else None

    def _note(self, number, _):
        self.signal = number


def _is_ignored(number):
    return signal.getsignal(number) is signal.SIG_IGN


def _end_at_second_signal(reader):
    """Read signal numbers, a byte each, until the other end is closed."""
    first = None
    while numbers := reader.recv(1):
        if numbers[0] not in SIGNALS:
            continue
        now = time.monotonic()
        first = now if first is None else first
        if now - first > GRACE:
            sys.stderr.write("stopped at once; the same command continues from the last checkpoint\n")
            sys.stderr.flush()
            os._exit(128 + numbers[0])
