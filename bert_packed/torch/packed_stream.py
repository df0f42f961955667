"""Packs of a stream of rows for torch, a buffer at a time, resumed at any pack."""

import itertools
import zlib
from collections.abc import Iterable, Iterator

import torch

from bert_packed.assembly.given_columns import TOKENS, refuse
from bert_packed.packing.arguments import MAX_SEED, check_choice, check_whole, shown
from bert_packed.packing.histogram import check_limits
from bert_packed.torch.collator import pack_rows, read_examples
from bert_packed.torch.dataset import check_state, find_worker
from bert_packed.torch.labelled_rows import KINDS

# Rows of the stream before the buffer, packs of it that were yielded, and a checksum of its rows
START = {"start": 0, "num_yielded": 0, "checksum": 0}


class PackedStream(torch.utils.data.IterableDataset):
    """`pack_dataset` for data that does not fit in memory, `buffer_size` sequences at a time.

    The workers of a DataLoader share the rows: each has its shards of a `datasets.IterableDataset`, or every
    n-th row. `state_dict` and `load_state_dict` are for a `StatefulDataLoader` of torchdata, or a loop
    without workers. No row is lost or repeated: rows are counted, and a run that continues reads and skips
    those that it has packed, since the state of a `datasets.IterableDataset` loses the rows of its shuffle.

    Ranks are not told apart: Trainer hands out the batches of its first process; elsewhere give each rank its
    own rows, as by `datasets.distributed.split_dataset_by_node`.

    Args:
        dataset: Iterable of dicts with `input_ids`, such as a `datasets.IterableDataset`, which has the same
            rows again in the same epoch; give its shuffle a seed.
        max_seq_length, max_sequences_per_pack, labels: Arguments of `pack_dataset`.
        buffer_size: Sequences that are packed by one plan, in memory.
        seed: Seed of the packs, to which the epoch is added.

    Raises:
        ValueError: an argument breaks its rule; in the iterator, a sequence does, numbered in its buffer; a
            state is of other arguments or rows.
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
        # Where the next iteration continues, and the newest one is
        self._state, self._place = None, dict(START)

    def set_epoch(self, epoch):
        """Choose the epoch of later iterations, of the rows as well where they have `set_epoch`."""
        if epoch != self._epoch:
            self._state, self._place = None, dict(START)
        self._epoch.fill_(epoch)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def state_dict(self):
        """Place of this process's or worker's iteration: dict."""
        return dict(self._state or {"epoch": int(self._epoch), **self._place, **self._settings()})

    def load_state_dict(self, state):
        """Make the next iteration continue from a state with the same worker and arguments."""
        check_state(state, self._settings())
        self.set_epoch(state["epoch"])
        self._state = dict(state)

    def __iter__(self):
        state, self._state = self._state or START, None
        self._place = {name: state[name] for name in START}
        return self._read(self._place, self._seed + int(self._epoch))

    def _read(self, place, seed):
        rows = self._rows(place["start"])
        while buffer := list(itertools.islice(rows, self._buffer_size)):
            checksum = zlib.crc32(repr([list(row[TOKENS]) for row in buffer]).encode())
            if place["num_yielded"] and checksum != place["checksum"]:
                rule = "have the rows that it had when the state was made: give its shuffle a seed"
                refuse("`dataset`", rule, f"others after {place['start']:,} rows")
            packs = pack_rows(read_examples(buffer), *self._limits, self._labels, seed)
            place["checksum"] = checksum
            while place["num_yielded"] < len(packs[TOKENS]):
                place["num_yielded"] += 1  # first, as `state_dict` follows the yield
                yield {name: values[place["num_yielded"] - 1] for name, values in packs.items()}
            place |= {"start": place["start"] + len(buffer), "num_yielded": 0}

    def _rows(self, start):
        divides_itself = isinstance(self._dataset, torch.utils.data.IterableDataset)
        worker, num_workers = (0, 1) if divides_itself else find_worker()
        return itertools.islice(self._dataset, worker + start * num_workers, None, num_workers)

    def _settings(self):
        names = ("max_seq_length", "max_sequences_per_pack", "buffer_size", "seed")
        return dict(zip(names, (*self._limits, self._buffer_size, self._seed), strict=True))
