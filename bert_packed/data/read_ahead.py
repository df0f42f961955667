"""The next batch, made while the device computes on this one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


class ReadAhead(Iterator):
    """Batches that a thread makes one ahead of who takes them.

    Args:
        batches: Endless batches that take time to make; `sources` as of `input_pipeline.CheckedBatches`.
    """

    def __init__(self, batches):
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._next = self._thread.submit(self._read)
        self._sources = {}

    def __next__(self):
        batch, self._sources = self._next.result()  # a mistake in the data is raised here
        self._next = self._thread.submit(self._read)
        return batch

    @property
    def sources(self):
        """Where the packs of the batch last given are, as of `CheckedBatches`."""
        return self._sources

    def _read(self):
        return next(self._batches), self._batches.sources
