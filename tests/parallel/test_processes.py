"""Decisions and the end of the processes of a cluster, with a service of the test."""

import atexit
import os
import socket
import threading
import time

import numpy as np
import pytest

from bert_packed.core.settings import InputError
from bert_packed.parallel import processes
from bert_packed.parallel.processes import ALONE, STATUS_LOST, Processes, Watch, end_lost


class LostError(Exception):
    """Error of a collective where a process is lost."""


class Service:
    """A service of one process; all of a cluster have one `store`, and meet in `share`."""

    strategy = None

    def __init__(self, store, is_first):
        self._store, self._is_first = store, is_first
        self.num_shared, self.left = 0, []

    def share(self, numbers):
        assert numbers.dtype in (np.int32, np.uint8)
        self.num_shared += 1
        if self._is_first:
            self._store["numbers"] = numbers
        self._store["barrier"].wait(20)
        found = self._store["numbers"]
        self._store["barrier"].wait(20)
        assert found.shape == numbers.shape  # as collectives demand
        return found

    def is_loss(self, error):
        return isinstance(error, LostError)

    def leave(self, together):
        self.left.append(together)


class Silent:
    """A watch that keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def say(self, line):
        self.asked.append(line)

    def stop(self):
        self.asked.append("stop")

    leave = stop


class Ended(BaseException):
    """A replacement for the end of the process, with its status."""


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    def end(status):
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(processes, "SILENT_SECONDS", 0.05)


def run_all(body, num=2):
    """Call `body(processes)` as several processes: what each returned or raised, and their services."""
    store = {"barrier": threading.Barrier(num)}
    services, found = [Service(store, index == 0) for index in range(num)], [None] * num

    def run(index):
        try:
            with Processes(index, num, services[index], Silent()) as some:
                found[index] = body(some)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, services


def test_the_first_process_decides():
    asked = []

    def body(some):
        decided = some.first_decides(lambda: asked.append(some.index) or {"stép": [1, 2]})
        return some.is_first, some.num, decided, some.first_decides(lambda: None)

    found, services = run_all(body, 3)
    assert found == [(index == 0, 3, {"stép": [1, 2]}, None) for index in range(3)]
    assert asked == [0]
    # two decisions, and all are at the end before one leaves
    assert [(one.num_shared, one.left) for one in services] == [(5, [True])] * 3


@pytest.mark.parametrize("error", [InputError("no\nsuch file"), OSError("disk full"), MemoryError("small")])
def test_a_mistake_that_the_first_finds_ends_all_with_its_line(monkeypatch, error):
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))

    def decide():
        raise error

    (first, second), services = run_all(lambda some: some.first_decides(decide))
    assert first is error
    assert isinstance(second, InputError) and str(second) == " ".join(str(error).split())
    assert [one.left for one in services] == [[False]] * 2
    assert [status for _, status in at_exit] == [2, 2]


def test_a_long_decision_keeps_no_exchange_waiting(monkeypatch):
    monkeypatch.setattr(processes, "NOT_YET_SECONDS", 0.02)
    waited = threading.Event()

    def decide():
        while services_of_first[0].num_shared < 4:
            time.sleep(0.01)
        waited.set()
        return "found"

    services_of_first = []

    def body(some):
        if some.is_first:
            services_of_first.append(some._service)
            time.sleep(0.05)
        return some.first_decides(decide)

    found, services = run_all(body)
    assert found == ["found"] * 2 and waited.is_set()
    assert services[0].num_shared == services[1].num_shared >= 4 + 2 + 1


def test_a_single_process_decides_alone():
    asked = []
    with ALONE as some:
        assert (some.is_first, some.index, some.num, some.strategy) == (True, 0, 1, None)
        assert some.first_decides(lambda: asked.append(1) or (1, 2)) == (1, 2)
    assert asked == [1]
    with pytest.raises(InputError), ALONE:
        ALONE.first_decides(lambda: (_ for _ in ()).throw(InputError("x")))


def test_a_lost_process_ends_this_one_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/x/train.py"])
    end = "; the same commands continue from the last checkpoint\n"
    with pytest.raises(Ended, match=f"^{STATUS_LOST}$"), Processes(1, 2, Service({}, False), Silent()):
        raise LostError("Connection closed\nby peer")
    assert capsys.readouterr().err == f"train.py: another process was lost: Connection closed by peer{end}"
    with pytest.raises(Ended, match=r"^75$"):
        end_lost("worker 0 (a:1) was lost")
    assert capsys.readouterr().err == f"train.py: worker 0 (a:1) was lost{end}"


@pytest.mark.parametrize(
    ("error", "status"),
    [(InputError("my own"), 2), (OSError("disk"), 2), (KeyboardInterrupt(), 130), (KeyError("a bug"), 1)],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_fails_does_not_wait(monkeypatch, error, status, index):
    """Its own words come first; of those that end so the first process is the last."""
    at_exit, service, slept = [], Service({}, index == 0), []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    watch = Silent()
    with pytest.raises(type(error)), Processes(index, 2, service, watch):
        raise error
    assert watch.asked == ["stop"]
    assert (service.num_shared, service.left) == (0, [False])
    ((end, given),) = at_exit
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    with pytest.raises(Ended, match=f"^{status}$"):
        end(given)
    assert slept == [1.05] * (index == 0)


class Ends:
    """Watches of three processes, of which each process's end is the line that it would print."""

    def __init__(self, monkeypatch, count=3):
        self.lines, self.is_over = [], threading.Event()
        monkeypatch.setattr(processes, "end_lost", self.end)
        addresses = [f"host-{index}:1" for index in range(count)]
        self.pairs = {index: socket.socketpair() for index in range(1, count)}
        self.first = Watch(addresses, {index: pair[0] for index, pair in self.pairs.items()})
        self.others = {index: Watch(addresses, {0: pair[1]}) for index, pair in self.pairs.items()}

    def end(self, line):
        self.lines.append(line)
        self.is_over.wait()

    def wait_for(self, number, seconds=20):
        deadline = time.monotonic() + seconds
        while len(self.lines) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        return sorted(self.lines)

    def close(self):
        for watch in (self.first, *self.others.values()):
            watch.stop()
        self.is_over.set()
        time.sleep(0.2)  # until nobody waits for them
        for pair in self.pairs.values():
            for one in pair:
                one.close()


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(processes, "ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(processes, "SILENT_SECONDS", 0.6)
    made = Ends(monkeypatch)
    yield made
    made.close()


def test_a_lost_process_is_named_to_all(three):
    """Also to those that are not connected with it."""
    three.others[2].stop()
    time.sleep(0.1)
    assert not three.lines  # signs of life, of the others
    three.pairs[2][1].shutdown(socket.SHUT_RDWR)
    assert three.wait_for(2) == ["worker 2 (host-2:1) was lost"] * 2


def test_a_silent_process_is_lost(three):
    three.others[1].stop()  # no more signs of life; the connection stays
    assert three.wait_for(2) == ["worker 1 (host-1:1) was lost"] * 2


def test_a_process_that_leaves_ends_the_others_later(three):
    three.others[1].leave()
    assert three.wait_for(2) == ["worker 1 (host-1:1) has ended", "worker 1 (host-1:1) was lost"]


def test_who_is_done_may_go(three):
    three.others[1].say(processes.DONE)
    three.others[1].stop()
    time.sleep(0.1)
    three.pairs[1][1].shutdown(socket.SHUT_RDWR)
    three.first.say(processes.DONE)
    three.first.stop()
    assert three.wait_for(1, 1.2) == []
