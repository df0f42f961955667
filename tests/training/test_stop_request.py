"""Signals: the first is noted for the loop, the second ends a process that is deep in compiled code."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from interrupts import interruptible

from bert_packed.training.stop_request import GRACE, StopRequest

# pbkdf2 is one call into C for minutes, and lets other threads run: like a compiled step
BUSY = """
import hashlib
from bert_packed.training.stop_request import StopRequest
with StopRequest(costs_nothing={}).watching():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_noted_and_handlers_come_back(number):
    with interruptible():
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        with StopRequest().watching() as stop:
            assert stop.signal is None
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # within the grace: the same request
            assert stop.signal == number
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_signal_by_which_several_processes_stop():
    stop = StopRequest()
    assert [stop.agreed(number) for number in (None, 0.0, 1.0)] == [None, None, signal.SIGTERM]
    stop.signal = signal.SIGINT
    assert [stop.agreed(number) for number in (None, 0.0, 2.0)] == [signal.SIGINT, None, signal.SIGINT]


def test_the_wakeup_descriptor_of_others_is_restored():
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    try:
        with StopRequest().watching():
            pass
    finally:
        assert signal.set_wakeup_fd(-1) == writer.fileno()
        reader.close()
        writer.close()


def test_another_thread_watches_nothing():
    """A program may train in a thread: only the main one may handle signals."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def watch():
        with StopRequest().watching() as stop:
            seen.append((stop.signal, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_an_interrupt_that_was_ignored_before_stays_ignored():
    """A batch system or `command &` in a script starts a run so; SIGTERM still stops it."""
    with interruptible(False):
        with StopRequest().watching() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal is None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("number", "costs_nothing"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)]
)
def test_signals_in_a_step_that_takes_minutes(number, costs_nothing):
    """The first said nothing, and waited for the compilation of a run that had no step to lose."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with interruptible():
        process = subprocess.Popen([sys.executable, "-c", BUSY.format(costs_nothing)], **pipes)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        first = process.stderr.readline()
        if is_waiting := not (costs_nothing and number == signal.SIGTERM):
            time.sleep(GRACE + 0.2)
            assert process.poll() is None
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    if is_waiting:
        assert first == "stops as soon as a step is over and saved; a second signal stops at once\n"
        assert err == "stopped at once; the same command continues from the last checkpoint\n"
    else:
        assert first == "stopped in the first step, where nothing is lost; the same command continues\n"
        assert err == ""
