"""Batches that grow by whole micro-batches, in the order of packs; and batches that a thread reads ahead.

It alone catches a thread that outlives its iterator, an error that is lost, and sources of another batch.
"""

import gc
import itertools
import threading
import time

import numpy as np
import pytest
from tiny import CONFIG, MAX_SEQ_LENGTH, write_data

from bert_packed.core.settings import InputError
from bert_packed.data.batches import NUM_AHEAD, BatchGrowth, CheckedBatches, GrowingBatches, ReadAhead
from bert_packed.data.input_pipeline import train_batches
from bert_packed.data.read_order import WHOLE, ProcessShard, index_files
from bert_packed.schema import PackSpec

SPEC = PackSpec(MAX_SEQ_LENGTH, 4, 12)
GROWTH = BatchGrowth(initial=2, full=8, micro_batch_size=2, num_steps=4)
SIZES = [2, 2, 4, 6, 8, 8]


def test_the_example():
    assert GROWTH.packs(np.arange(6)).tolist() == SIZES
    assert [GROWTH.packs_before(step) for step in range(7)] == [0, 2, 4, 8, 14, 22, 30]
    wanted = {1: 1, 2: 1, 3: 2, 4: 2, 8: 3, 9: 4, 14: 4, 15: 5, 22: 5, 23: 6, 30: 6, 31: 7}
    assert {packs: GROWTH.steps_for(packs) for packs in wanted} == wanted
    assert [BatchGrowth(8, 8, 2).steps_for(packs) for packs in (1, 8, 9, 80)] == [1, 1, 2, 10]
    assert BatchGrowth(8, 8, 2).packs(np.arange(3)).tolist() == [8, 8, 8]
    assert BatchGrowth(2, 8, 2, 2).packs(np.arange(4)).tolist() == [2, 4, 8, 8]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def read(files, num_steps, first_step=0, shard=WHOLE):
    micro, index = GROWTH.micro_batch_size, index_files(files)
    first = GROWTH.packs_before(first_step) // micro
    packed = train_batches(index, SPEC, micro, 3, 5, first, shard=shard)
    batches = GrowingBatches(CheckedBatches(packed, files, SPEC, CONFIG), GROWTH, first_step)
    return [(next(batches), batches.sources) for _ in range(num_steps)]


def test_steps_of_one_shape_that_read_all_packs_in_order(files):
    packed = train_batches(index_files(files), SPEC, sum(SIZES), 3, 5)
    order = next(CheckedBatches(packed, files, SPEC, CONFIG))
    place = 0
    for (batch, sources), size in zip(read(files, 6), SIZES, strict=True):
        assert sum(map(len, sources.values())) == size
        for name, values in batch.items():
            assert len(values) == GROWTH.full and values.dtype == order[name].dtype
            np.testing.assert_array_equal(values[:size], order[name][place : place + size], err_msg=name)
            assert not values[size:].any()
        place += size


@pytest.mark.parametrize("first_step", [1, 3, 5])
def test_a_run_goes_on_where_it_stopped(files, first_step):
    whole = read(files, first_step + 3)[first_step:]
    for (one, its_sources), (other, sources) in zip(read(files, 3, first_step), whole, strict=True):
        assert its_sources == sources
        for name, values in other.items():
            np.testing.assert_array_equal(one[name], values, err_msg=name)


def test_workers_have_parts_of_every_micro_batch(files):
    shards = [read(files, 6, shard=ProcessShard(2, index, 2)) for index in range(2)]
    for (whole, _), *parts in zip(read(files, 6), *shards, strict=True):
        by_part = np.stack(
            [part["token_ids"] for part, _ in parts], axis=1
        )  # one pack of each micro-batch each
        np.testing.assert_array_equal(by_part.reshape(whole["token_ids"].shape), whole["token_ids"])


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
    # No more are prepared: beside the one that was taken, one waits for room
    while waits and numbered.num_taken < NUM_AHEAD + 2:
        time.sleep(0.001)
    if waits:
        time.sleep(0.02)
        assert numbered.num_taken == NUM_AHEAD + 2
    assert len(threads()) == 1
    end(ahead)
    del ahead
    gc.collect()
    assert not threads()
