"""What processes of a cluster agree on and how they end, with a service of the test's own."""

import os
import queue
import threading

import pytest

from bert_packed.core.settings import InputError
from bert_packed.parallel import processes
from bert_packed.parallel.cluster import Cluster
from bert_packed.parallel.processes import ALONE, STATUS_LOST, Processes

ADDRESSES = ("a:1", "b:2")


class Service:
    """One store for all; `lost` is what `find_lost` gives."""

    strategy = None

    def __init__(self, num=2):
        self.values, self.lost, self.left, self.waited = {}, [], [], []
        self._changed, self._barrier = threading.Condition(), threading.Barrier(num)

    def set(self, key, value):
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key, seconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, min(seconds, 20)):
                raise TimeoutError(key)
            return self.values[key]

    def wait(self, name, seconds):
        self.waited.append(name)
        self._barrier.wait(20)

    def find_lost(self):
        return self.lost

    def leave(self, is_first):
        self.left.append(is_first)


@pytest.fixture
def service(monkeypatch):
    for name in ("WATCH_SECONDS", "GRACE_SECONDS", "HEARTBEAT_SECONDS"):
        monkeypatch.setattr(processes, name, 0.02)
    return Service()


def both(service, body):
    """Call `body(processes)` as two processes: what each returned or raised."""
    found = [None, None]

    def run(index):
        try:
            with Processes(Cluster(ADDRESSES, index), service) as some:
                found[index] = body(some)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_who_is_first_and_what_it_decides(service):
    asked = []

    def body(some):
        decided = some.first_decides(lambda: asked.append(some.index) or {"step": [1, 2]})
        return some.is_first, some.num, decided, some.first_decides(lambda: None)

    assert both(service, body) == [(True, 2, {"step": [1, 2]}, None), (False, 2, {"step": [1, 2]}, None)]
    assert asked == [0]


def test_all_wait_at_the_same_place_and_at_the_end(service):
    order = queue.Queue()

    def body(some):
        order.put("before")
        some.wait("here")
        order.put("after")

    both(service, body)
    assert [order.get() for _ in range(4)] == ["before", "before", "after", "after"]
    assert service.waited == ["1 here"] * 2 + ["2 the end"] * 2
    assert sorted(service.left) == [False, True]


@pytest.mark.parametrize("error", [InputError("no\nsuch file"), OSError("disk full"), MemoryError("small")])
def test_a_mistake_that_the_first_finds_ends_all_with_its_line(service, error):
    def decide():
        raise error

    first, second = both(service, lambda some: some.first_decides(decide))
    assert first is error
    assert isinstance(second, InputError) and str(second) == " ".join(str(error).split())
    assert sorted(service.left) == [False, True]


def test_one_process_asks_nobody():
    asked = []
    with ALONE as some:
        some.wait("anywhere")
        assert (some.is_first, some.index, some.num, some.strategy) == (True, 0, 1, None)
        assert some.first_decides(lambda: asked.append(1) or (1, 2)) == (1, 2)
    assert asked == [1]
    with pytest.raises(InputError), ALONE:
        ALONE.first_decides(lambda: (_ for _ in ()).throw(InputError("x")))


@pytest.fixture
def ended(monkeypatch, capsys):
    """What ends the process: a queue of (status, standard error)."""
    found = queue.Queue()

    def end(status):
        found.put((status, capsys.readouterr().err))
        threading.Event().wait()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("sys.argv", ["/x/train.py"])
    return found


@pytest.mark.parametrize(
    ("values", "reason"), [({}, "was lost"), ({"ended 0": "no such file."}, "has ended: no such file")]
)
def test_a_lost_process_ends_this_one_with_its_name(service, ended, values, reason):
    service.values.update(values)
    some = Processes(Cluster(ADDRESSES, 1), service)
    some.__enter__()
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    service.lost = [0]
    status, line = ended.get(timeout=20)
    assert status == STATUS_LOST == 75
    assert line == f"train.py: worker 0 (a:1) {reason}; the same commands continue from the last checkpoint\n"
    some._leaving.set()


def test_a_service_that_learns_of_a_loss_by_itself_says_so(service, ended):
    Processes(Cluster(ADDRESSES, 1), service)
    threading.Thread(target=service.on_lost, args=(0,), daemon=True).start()
    assert ended.get(timeout=20)[0] == STATUS_LOST


def test_who_ends_in_order_does_not_end_as_one_that_lost_another(service, ended):
    some = Processes(Cluster(ADDRESSES, 1), service)
    with pytest.raises(InputError, match="my own"), some:
        service.lost = [0]
        raise InputError("my own")
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    assert service.values == {"ended 1": "my own"}


def test_an_error_of_a_collective_waits_for_the_name_of_who_was_lost(service, ended, monkeypatch):
    monkeypatch.setattr(processes, "HEARTBEAT_SECONDS", 20)
    some = Processes(Cluster(ADDRESSES, 1), service)

    def train():
        with some:
            threading.Timer(0.2, lambda: service.lost.append(0)).start()
            raise RuntimeError("connection closed by peer")

    threading.Thread(target=train, daemon=True).start()
    status, line = ended.get(timeout=15)
    assert status == STATUS_LOST and "worker 0 (a:1) was lost" in line
