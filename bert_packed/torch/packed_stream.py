"""Packs of a stream of rows for torch, a buffer at a time, resumed at any pack."""

import itertools
from collections.abc import Iterable, Iterator

import torch

from bert_packed.assembly.given_columns import TOKENS, refuse
from bert_packed.packing.arguments import MAX_SEED, check_choice, check_whole, shown
from bert_packed.packing.histogram import check_limits
from bert_packed.torch.collator import pack_rows, read_examples
from bert_packed.torch.dataset import find_worker
from bert_packed.torch.labelled_rows import KINDS


class PackedStream(torch.utils.data.IterableDataset):
    """`pack_dataset` for data that does not fit in memory, `buffer_size` sequences at a time.

    The workers of a DataLoader share the rows: each has its shards of a `datasets.IterableDataset`, or every
    n-th row. `state_dict` and `load_state_dict` are for a `StatefulDataLoader` of torchdata, or a loop
    without workers. No row is lost or repeated: rows are counted, and a run that continues reads and skips
    those that it has packed, since the state of a `datasets.IterableDataset` loses the rows of its shuffle.

    Args:
        dataset: Iterable of dicts with `input_ids`, such as a `datasets.IterableDataset`, which has the same
            rows again in the same epoch; give its shuffle a seed.
        max_seq_length, max_sequences_per_pack, labels: Arguments of `pack_dataset`.
        buffer_size: Sequences that are packed by one plan, in memory.
        seed: Seed of the packs, to which the epoch is added.

    Raises:
        ValueError: an argument breaks its rule; in the iterator, a sequence does, numbered in its buffer; a
            state is of other arguments.
    """

    def __init__(
        self,
        dataset,
        max_seq_length,
        max_sequences_per_pack="max",
        *,
        buffer_size=10_000,
        labels=None,
        seed=0,
    ):
        super().__init__()
        if not isinstance(dataset, Iterable) or isinstance(dataset, Iterator):
            refuse("`dataset`", "be an iterable, which begins again in each epoch", shown(dataset))
        check_limits(max_seq_length, max_sequences_per_pack)
        check_whole("buffer_size", buffer_size, 1)
        check_whole("seed", seed, maximum=MAX_SEED)
        if labels is not None:
            check_choice("labels", labels, KINDS)
        self._dataset, self._labels, self._seed, self._buffer_size = dataset, labels, seed, buffer_size
        self._limits = max_seq_length, max_sequences_per_pack
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # which persistent workers see
        # Where the next iteration continues; rows of the stream before the buffer; packs of it
        self._state, self._start, self._num_yielded = None, 0, 0

    def set_epoch(self, epoch):
        """Choose the epoch of later iterations, of the rows as well where they have `set_epoch`."""
        if epoch != self._epoch:
            self._state, self._start, self._num_yielded = None, 0, 0
        self._epoch.fill_(epoch)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def state_dict(self):
        """Place of this process's or worker's iteration: dict."""
        place = {"epoch": int(self._epoch), "start": self._start, "num_yielded": self._num_yielded}
        return dict(self._state or place | self._settings())

    def load_state_dict(self, state):
        """Make the next iteration continue from a state with the same worker and arguments."""
        for name, value in self._settings().items():
            if state[name] != value:
                refuse(f"`{name}`", f"be {state[name]}, as when the state was made", value)
        self.set_epoch(state["epoch"])
        self._state = dict(state)

    def __iter__(self):
        state, self._state = self._state or {}, None
        self._start, self._num_yielded = state.get("start", 0), state.get("num_yielded", 0)
        return self._read(self._seed + int(self._epoch))

    def _read(self, seed):
        rows = self._rows()
        while buffer := list(itertools.islice(rows, self._buffer_size)):
            packs = pack_rows(read_examples(buffer), *self._limits, self._labels, seed)
            while self._num_yielded < len(packs[TOKENS]):
                self._num_yielded += 1  # first, as `state_dict` follows the yield
                yield {name: values[self._num_yielded - 1] for name, values in packs.items()}
            self._start += len(buffer)
            self._num_yielded = 0

    def _rows(self):
        divides_itself = isinstance(self._dataset, torch.utils.data.IterableDataset)
        worker, num_workers = (0, 1) if divides_itself else find_worker()
        return itertools.islice(self._dataset, worker + self._start * num_workers, None, num_workers)

    def _settings(self):
        names = ("max_seq_length", "max_sequences_per_pack", "buffer_size", "seed")
        return dict(zip(names, (*self._limits, self._buffer_size, self._seed), strict=True))
