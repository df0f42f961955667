"""Several items are computed at once, the first alone, and results keep the order of the items."""

import gc
import threading
import time
import weakref

import pytest

from bert_packed.evaluation import inference
from bert_packed.evaluation.inference import map_in_threads

SECONDS = 10  # to wait for another thread, which takes none
MOMENT = 0.1  # for what must not happen to happen


@pytest.mark.parametrize("num_at_once", [2, 3])
def test_items_are_computed_at_once(num_at_once):
    """Each waits for the others of its round; alone it would wait in vain."""
    round_of = threading.Barrier(num_at_once, timeout=SECONDS)
    inside, most, lock = [0], [0], threading.Lock()

    def function(item):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        if item:
            round_of.wait()
        with lock:
            inside[0] -= 1
        return -item

    items = range(1 + 4 * num_at_once)
    assert list(map_in_threads(function, items, num_at_once)) == [(item, -item) for item in items]
    assert list(map_in_threads(function, [], num_at_once)) == []
    assert most[0] == num_at_once


def test_the_first_call_ends_before_others_begin():
    """A function that is compiled at its first call must not be compiled by two threads."""
    events = []

    def function(item):
        events.append(("begins", item, threading.current_thread() is threading.main_thread()))
        if item == 0:
            time.sleep(MOMENT)
            events.append(("ends", item, True))

    list(map_in_threads(function, range(3), 2))
    assert events[:2] == [("begins", 0, True), ("ends", 0, True)]
    assert sorted(events[2:]) == [("begins", 1, False), ("begins", 2, False)]


def test_one_thread_is_the_callers():
    threads = {thread for _, thread in map_in_threads(lambda _: threading.current_thread(), range(3), 1)}
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize(("num_at_once", "ahead"), [(1, 1), (2, 3), (4, 5)])
def test_items_are_made_a_few_ahead(num_at_once, ahead):
    made = []
    items = (made.append(item) or item for item in range(20))
    most = max(
        len(made) - taken for taken, _ in enumerate(map_in_threads(lambda item: item, items, num_at_once))
    )
    assert most == ahead and len(made) == 20


@pytest.mark.parametrize("num_at_once", [1, 2])
@pytest.mark.parametrize("wrong", [0, 1, 5])
def test_a_mistake_is_raised_in_its_place(num_at_once, wrong):
    begun, taken = [], []

    def function(item):
        begun.append(item)
        if item == wrong:
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match=f"item {wrong}"):
        for item, _ in map_in_threads(function, range(20), num_at_once):
            taken.append(item)
    assert taken == list(range(wrong))
    assert max(begun) <= wrong + num_at_once
    assert no_thread_is_left()


def no_thread_is_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("map-in-threads")]


def test_closing_early_waits_for_calls_and_begins_no_other():
    begun, may_end = [], threading.Event()

    def function(item):
        begun.append(item)
        assert item < 2 or may_end.wait(SECONDS)
        return item

    results = map_in_threads(function, range(20), 2)
    assert [next(results), next(results)] == [(0, 0), (1, 1)]
    last = time.monotonic() + SECONDS
    while len(begun) < 4 and time.monotonic() < last:  # a call that no thread has taken yet would not begin
        time.sleep(MOMENT / 10)
    threading.Timer(MOMENT, may_end.set).start()
    results.close()
    assert may_end.is_set() and sorted(begun) == [0, 1, 2, 3] and no_thread_is_left()


def test_after_an_interrupt_nothing_begins(monkeypatch):
    """It comes while the caller waits for 1: 2 is computed then, and 3 waits."""
    begun, all_begun, may_end = [], threading.Event(), threading.Event()

    def function(item):
        begun.append(item)
        if len(begun) == 3:
            all_begun.set()
        assert item == 0 or may_end.wait(SECONDS)

    def interrupted(waiting):
        assert [item for item, _ in waiting] == [1, 2, 3] and all_begun.wait(SECONDS)
        waiting[-1][1].add_done_callback(lambda _: may_end.set())  # once 3 is cancelled
        raise KeyboardInterrupt

    monkeypatch.setattr(inference, "_take_first", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(map_in_threads(function, range(20), 2))
    assert sorted(begun) == [0, 1, 2] and no_thread_is_left()


def test_a_mistake_of_the_items_is_raised():
    def items():
        yield from range(3)
        raise ValueError("no more")

    taken = []
    with pytest.raises(ValueError, match="no more"):
        for item, _ in map_in_threads(lambda item: item, items(), 2):
            taken.append(item)
    assert taken == [0]  # the third would have come after 1 and 2 had begun


def test_a_failed_item_is_not_kept():
    class Item:
        pass

    def function(item):
        if item is items[1]:
            raise ValueError("wrong")

    items = [Item() for _ in range(4)]
    seen = [weakref.ref(item) for item in items]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="wrong"):
            list(map_in_threads(function, iter(items), 2))
        items.clear()
        assert [reference() for reference in seen] == 4 * [None]
    finally:
        gc.enable()
