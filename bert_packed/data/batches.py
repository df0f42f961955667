"""Batches checked against the model, grown step by step (batch-size warm-up), and read ahead in a thread.

Legend: B packs per batch, of growing ones per full step; M packs per micro-batch.
"""

import dataclasses
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.objectives.features import RECORDED

NUM_AHEAD = 2  # batches that are ready; the thread prepares one more
SECONDS_TO_END = 10  # a read that hangs is left behind


class CheckedBatches(Iterator):
    """Iterator over batches, dicts of int32 and float32 arrays, whose ids are within the model's tables.

    `batches` are from `train_batches` or `eval_batches`, with `files`, `spec` and `features` as there. Raises
    `InputError` where a record is damaged, has another shape, an id outside the model's tables, or continues
    a pack that it does not follow.
    """

    def __init__(self, batches, files, spec, model_config, features=RECORDED):
        self._files = files
        self._limits = {one: one.limit(model_config, spec) for one in features if one.limit}
        self._beginning = [one for one in features if one.begins_at_0]
        self._last = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._batches = iter(batches)

    def __next__(self):
        batch, self._last = next(self._batches)
        for feature, limit in self._limits.items():
            values = batch[feature.name]
            if values.min() < 0 or values.max() >= limit:
                is_wrong = (values < 0) | (values >= limit)
                row, place = np.argwhere(is_wrong)[0]
                raise InputError(
                    f"{self._origin(row)}: every value of {feature.record_name} must be from 0 and below "
                    f"{feature.limit_name}={limit}. Received: {values[row, place]}."
                )
        for feature in self._beginning:
            firsts = batch[feature.name][:, 0]
            if firsts.any():
                row = int(np.argmax(firsts != 0))
                raise InputError(
                    f"{self._origin(row)}: {feature.record_name} must begin at 0, but in training on rows of "
                    f"--split_sequences, whose manifest.json lies beside them. Received: {firsts[row]}."
                )
        return batch

    def _origin(self, row):
        files, numbers = self._last
        return f"{self._files[files[row]]}, record {numbers[row]}"

    @property
    def sources(self):
        """Records of the last batch: dict from file to record numbers, from 1, as in `find_sources.py`."""
        found = {}
        for file, number in zip(*(values.tolist() for values in self._last), strict=True):
            found.setdefault(str(self._files[file]), []).append(number)
        return found

    def packs(self, index):
        """Packs of the last batch: int64 `[B]`, numbered from 0 over all files of a `PackIndex`."""
        files, numbers = self._last
        return index.starts[files] + numbers - 1


@dataclasses.dataclass(frozen=True)
class BatchGrowth:
    """Packs of each step, by whole micro-batches; all sizes last about as many steps. From 2 to 8 over 4
    steps, M = 2:

    step           0  1  2  3  4  5
    packs          2  2  4  6  8  8
    packs before   0  2  4  8 14 22
    """

    initial: int  # a multiple of M
    full: int  # B, a multiple of M
    micro_batch_size: int
    num_steps: int = 0  # until B is reached; 0 for B from the start

    def packs(self, steps):
        """Packs of steps, from 0: int64 of the shape of `steps`, a scalar or `[n]`."""
        more = (self.full - self.initial) // self.micro_batch_size
        grown = more * np.minimum(steps, self.num_steps) // max(self.num_steps, 1)
        return np.where(
            np.asarray(steps) < self.num_steps, self.initial + grown * self.micro_batch_size, self.full
        )

    def packs_before(self, step):
        growing = np.arange(min(step, self.num_steps))
        return int(self.packs(growing).sum()) + self.full * max(step - self.num_steps, 0)

    def steps_for(self, num_packs):
        """Number of steps, at least 1, until `num_packs` are read; the last step may read more."""
        growing = np.cumsum(self.packs(np.arange(self.num_steps)))
        missing = num_packs - self.packs_before(self.num_steps)
        if missing > 0:
            return self.num_steps + -(-missing // self.full)
        return int(np.searchsorted(growing, num_packs)) + 1


class GrowingBatches(Iterator):
    """Batches of B packs, arrays of constant shape, the first of which end in empty packs.

    `batches` are `CheckedBatches` of one micro-batch each, or of a process's part of one.
    """

    def __init__(self, batches, growth, first_step):
        self._batches, self._growth, self._step = batches, growth, first_step
        self.sources = {}

    def __next__(self):
        growth = self._growth
        number = int(growth.packs(self._step)) // growth.micro_batch_size
        parts, self.sources = [], {}
        for _ in range(number):
            parts.append(next(self._batches))
            for file, records in self._batches.sources.items():
                self.sources.setdefault(file, []).extend(records)
        self._step += 1
        missing = growth.full // growth.micro_batch_size - number
        return {
            name: np.concatenate([*(part[name] for part in parts), *[np.zeros_like(values)] * missing])
            for name, values in parts[0].items()
        }


class ReadAhead(Iterator):
    """Iterator over batches; a thread prepares the next ones while the device computes.

    The thread's errors are raised here. It ends with the iterator: at the last batch, at an error, at
    `close`, and when nobody holds the iterator any more.
    """

    def __init__(self, batches):
        self.sources = {}  # of the last batch's iterator, at that batch
        self._queue, self._stop = queue.Queue(NUM_AHEAD), threading.Event()
        # The function gets the queue alone: a reference to the iterator would keep it alive
        arguments = batches, self._queue, self._stop
        # A read that hangs must not keep the program from its end: neither this thread nor the finalizer does
        thread = threading.Thread(target=_fill_queue, args=arguments, name="read-ahead", daemon=True)
        self._end = weakref.finalize(self, _end_thread, thread, self._queue, self._stop)
        self._end.atexit = False
        thread.start()

    def __next__(self):
        if self._stop.is_set():
            raise StopIteration
        batch, sources, error = self._queue.get()
        if batch is None:
            self.close()
            raise error
        self.sources = sources
        return batch

    def is_ready(self):
        """False where the next batch is still to wait for."""
        return not self._queue.empty()

    def close(self):
        """End the thread, and the iterator with it."""
        self._end()


def _fill_queue(batches, ready, stop):
    """Put (batch, sources, None) of each batch into a queue, and at the end (None, None, why it ended)."""
    try:
        while not stop.is_set():
            batch = next(batches)
            ready.put((batch, getattr(batches, "sources", None), None))
    except BaseException as error:  # the iterator's user gets whatever it is, StopIteration too
        if not stop.is_set():
            ready.put((None, None, error))


def _end_thread(thread, ready, stop):
    stop.set()
    # Garbage may be collected in the thread itself, which may hold the queue's lock
    if thread is threading.current_thread():
        return
    while not ready.empty():  # the thread may wait for room
        ready.get()
    thread.join(SECONDS_TO_END)
