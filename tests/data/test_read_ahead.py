"""Reading ahead: a thread that outlives its iterator, an error that is lost, or sources of another batch."""

import gc
import itertools
import threading
import time

import pytest

from bert_packed.core.settings import InputError
from bert_packed.data.batches import NUM_AHEAD, ReadAhead


class Numbered:
    """Batches 0, 1, ... with sources, which end by an error or after some."""

    def __init__(self, num=10**9, error=StopIteration):
        self.num, self.error, self.num_taken = num, error, 0

    def __next__(self):
        if self.num_taken == self.num:
            raise self.error
        self.num_taken += 1
        return self.num_taken - 1

    @property
    def sources(self):
        return {"file": [self.num_taken]}


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not threads()
    yield
    gc.collect()
    assert not threads()


def test_batches_keep_their_order_and_sources():
    ahead = ReadAhead(Numbered(20))
    assert [(batch, ahead.sources) for batch in ahead] == [(n, {"file": [n + 1]}) for n in range(20)]
    assert not threads()  # at the end, while the iterator is still held
    assert list(ahead) == []


@pytest.mark.parametrize("num", [0, 1, NUM_AHEAD, 9])
@pytest.mark.parametrize(
    "error", [InputError("x, record 7: is damaged"), OSError("disk"), KeyboardInterrupt()]
)
def test_an_error_comes_after_the_batches_before_it(num, error):
    ahead = ReadAhead(Numbered(num, error))
    assert list(itertools.islice(ahead, num)) == list(range(num))
    with pytest.raises(type(error)) as found:
        next(ahead)
    assert found.value is error and not threads()
    assert list(ahead) == []


def close(ahead):
    ahead.close()
    ahead.close()
    assert list(ahead) == []


def interrupt(ahead):
    with pytest.raises(KeyboardInterrupt):
        for _ in ahead:
            raise KeyboardInterrupt
    ahead.close()


@pytest.mark.parametrize(
    "end", [close, interrupt, lambda ahead: None], ids=["closed", "interrupted", "dropped"]
)
@pytest.mark.parametrize("waits", [True, False], ids=["thread waits for room", "thread is busy"])
def test_the_thread_ends_with_its_iterator(end, waits):
    numbered = Numbered()
    ahead = ReadAhead(numbered)
    assert next(ahead) == 0
    while waits and numbered.num_taken < NUM_AHEAD + 2:
        time.sleep(0.001)
    assert len(threads()) == 1
    end(ahead)
    del ahead
    gc.collect()
    assert not threads()


def test_few_batches_are_prepared():
    numbered = Numbered()
    ahead = ReadAhead(numbered)
    next(ahead)
    time.sleep(0.1)
    assert numbered.num_taken == NUM_AHEAD + 2  # one taken, one that waits for room
    ahead.close()
