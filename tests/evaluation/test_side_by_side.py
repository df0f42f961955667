"""Several items are computed at once, the first alone, and results keep the order of the items."""

import threading

import pytest

from bert_packed.evaluation.side_by_side import side_by_side

SECONDS = 60  # to wait for another thread, which takes none


@pytest.mark.parametrize("num_at_once", [2, 3])
def test_as_many_as_asked_are_inside_at_the_same_time(num_at_once):
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
    assert list(side_by_side(function, items, num_at_once)) == [(item, -item) for item in items]
    assert most[0] == num_at_once


def test_results_wait_for_the_items_before_them():
    last_is_done = threading.Event()

    def function(item):
        if item == 1:
            assert last_is_done.wait(SECONDS)
        if item == 2:
            last_is_done.set()
        return item

    assert [item for item, _ in side_by_side(function, range(4), 2)] == [0, 1, 2, 3]


def test_the_first_is_over_before_others_begin():
    """As a function that is compiled at its first call must not be compiled by two threads."""
    events = []

    def function(item):
        events.append(("begins", item, threading.current_thread() is threading.main_thread()))
        if item == 0:
            threading.Event().wait(0.05)
            events.append(("ends", item, True))

    list(side_by_side(function, range(3), 2))
    assert events[:2] == [("begins", 0, True), ("ends", 0, True)]
    assert sorted(events[2:]) == [("begins", 1, False), ("begins", 2, False)]


def test_one_at_a_time_is_the_callers_thread():
    threads = {thread for _, thread in side_by_side(lambda _: threading.current_thread(), range(3), 1)}
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize(("num_at_once", "ahead"), [(1, 1), (2, 3), (4, 5)])
def test_items_are_made_a_few_ahead(num_at_once, ahead):
    made = []
    items = (made.append(item) or item for item in range(20))
    most = max(
        len(made) - taken for taken, _ in enumerate(side_by_side(lambda item: item, items, num_at_once))
    )
    assert most == ahead and len(made) == 20


@pytest.mark.parametrize("num_at_once", [1, 2])
@pytest.mark.parametrize("wrong", [0, 1, 5])
def test_a_mistake_is_raised_in_its_place_and_nothing_begins_after_it(num_at_once, wrong):
    begun, taken = [], []

    def function(item):
        begun.append(item)
        if item == wrong:
            raise ValueError(f"item {item}")
        return item

    with pytest.raises(ValueError, match=f"item {wrong}"):
        for item, _ in side_by_side(function, range(20), num_at_once):
            taken.append(item)
    assert taken == list(range(wrong))
    assert max(begun) <= wrong + num_at_once
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("side-by-side")]


def test_a_mistake_of_the_items_is_raised():
    def items():
        yield from range(3)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(side_by_side(lambda item: item, items(), 2))


@pytest.mark.parametrize("num_at_once", [1, 2])
def test_of_no_item_there_is_nothing(num_at_once):
    assert list(side_by_side(lambda item: item, [], num_at_once)) == []
