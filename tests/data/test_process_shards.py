"""Shares of several processes: joined they are the order of one, and nobody reads another's packs."""

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from packs import random_packs, write_packs
from tiny import CONFIG, MAX_SEQ_LENGTH

from bert_packed.core.settings import InputError
from bert_packed.data.batches import CheckedBatches
from bert_packed.data.input_pipeline import eval_batches, train_batches
from bert_packed.data.read_order import WHOLE, ProcessShard, index_files, read_order
from bert_packed.schema import PackSpec

SPEC = PackSpec(MAX_SEQ_LENGTH, 4, 12)
COUNTS = (19, 1, 8, 22)
NUM_PACKS = sum(COUNTS)
STEP = 16  # packs of a step: fifty are not a whole number of steps
SEED = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("packs"), np.random.default_rng(4)
    paths = [str(folder / f"{number}.tfrecord") for number in range(len(COUNTS))]
    for path, count in zip(paths, COUNTS, strict=True):
        write_packs(path, random_packs(rng, count, MAX_SEQ_LENGTH), MAX_SEQ_LENGTH)
    return paths


@pytest.fixture(scope="module")
def written(files):
    """The tokens of every pack, in the order on disk."""
    (batch,) = CheckedBatches(eval_batches(files, SPEC, NUM_PACKS), files, SPEC, CONFIG)
    assert len(set(rows(batch))) == NUM_PACKS
    return rows(batch)


def rows(batch):
    return [tuple(row) for row in batch["token_ids"].tolist()]


def join(parts, micro, num_processes):
    """One step of all processes, put together again, micro-batch after micro-batch."""
    own = micro // num_processes
    return [
        row for first in range(0, len(parts[0]), own) for part in parts for row in part[first : first + own]
    ]


def order_of_one(num_packs, buffer, count):
    return list(itertools.islice(itertools.chain.from_iterable(read_order(num_packs, SEED, buffer)), count))


# Buffers hold one pack, a few, no multiple of a micro-batch, and more than there are; steps run across blocks
# and the ends of epochs
@pytest.mark.parametrize("buffer", [1, 7, 33, 1000])
@pytest.mark.parametrize("num_packs", [3, 50, 64])
@pytest.mark.parametrize("first_step", [0, 3, 11])
def test_shares_joined_are_the_order_of_one_process(buffer, num_packs, first_step):
    """They may begin anywhere, after any other number of processes."""
    first, count = first_step * STEP, 3 * num_packs // STEP + 2
    expected = order_of_one(num_packs, buffer, first + count * STEP)[first:]
    for micro, num_processes in ((16, 1), (4, 1), (16, 2), (8, 4), (4, 2), (4, 4)):
        parts = []
        for index in range(num_processes):
            shard = ProcessShard(micro, index, num_processes)
            blocks = shard.of_blocks(read_order(num_packs, SEED, buffer, first), first)
            size = shard.batch_size(STEP)
            own = list(itertools.islice(itertools.chain.from_iterable(blocks), count * size))
            parts.append([own[start : start + size] for start in range(0, count * size, size)])
        found = [pack for step in zip(*parts, strict=True) for pack in join(step, micro, num_processes)]
        assert found == expected, (micro, num_processes)


@pytest.mark.parametrize("buffer", [1, 33])
def test_a_process_reads_no_pack_but_its_own(tmp_path, files, buffer):
    """It goes on as before if every pack of the other processes is destroyed."""
    shard = ProcessShard(8, 2, 4)
    index = index_files(files)

    def tokens(index):
        packed = train_batches(index, SPEC, STEP, SEED, buffer, shard=shard)
        return [rows(batch) for batch, _ in itertools.islice(packed, 2)]

    own, num_read = set(), 0
    for packs in read_order(NUM_PACKS, SEED, buffer):
        own.update(packs[shard.holds(num_read + np.arange(len(packs)))].tolist())
        num_read += len(packs)
        if num_read >= 2 * STEP:  # a block is read as a whole
            break
    assert 0 < len(own) < NUM_PACKS / 3
    copies = []
    for number, path in enumerate(files):
        content = bytearray(Path(path).read_bytes())
        for record, (start, end) in enumerate(itertools.pairwise(index.offsets[number].tolist())):
            if index.starts[number] + record not in own:
                content[start:end] = b"\xff" * (end - start)
        copies.append(str(tmp_path / f"{number}.tfrecord"))
        Path(copies[-1]).write_bytes(content)
    assert tokens(dataclasses.replace(index, files=copies)) == tokens(index)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts what a process reads")
def test_four_processes_read_the_bytes_of_one(tmp_path):
    """Records large enough that what else the test reads does not count."""
    path, length, count = str(tmp_path / "packed.tfrecord"), 512, 256
    write_packs(path, random_packs(np.random.default_rng(1), count, 24), length)
    index, spec = index_files([path]), PackSpec(length, 4, 12)

    def num_read(shard):
        packed = train_batches(index, spec, 32, SEED, 128, shard=shard)
        batches = itertools.islice(packed, count // 32)
        before = bytes_read()
        assert sum(len(batch["token_ids"]) for batch, _ in batches) == count // shard.num_processes
        return bytes_read() - before

    size = Path(path).stat().st_size
    # Two blocks of 128 packs, of an epoch of 256, are prepared ahead when the last batch is taken
    assert num_read(WHOLE) < 2.2 * size
    for process in range(4):
        assert num_read(ProcessShard(8, process, 4)) < 2.2 * size / 4


def bytes_read():
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("num_packs", "num_processes"), [(15, 1), (1, 2), pytest.param(9, 4, marks=pytest.mark.slow), (50, 2)]
)
def test_evaluation_shares_hold_every_pack_once(tmp_path, files, num_packs, num_processes):
    batch_size = 8
    packs = [random_packs(np.random.default_rng(number), 1, MAX_SEQ_LENGTH)[0] for number in range(num_packs)]
    half = num_packs // 2
    paths = [str(tmp_path / name) for name in ("a.tfrecord", "b.tfrecord")][: 1 + bool(half)]
    for path, some in zip(paths, (packs[half:], packs[:half]), strict=False):
        write_packs(path, some, MAX_SEQ_LENGTH)
    (whole,) = CheckedBatches(eval_batches(paths, SPEC, num_packs), paths, SPEC, CONFIG)
    empty, num_batches = (0,) * MAX_SEQ_LENGTH, -(-num_packs // batch_size)
    wanted = rows(whole) + [empty] * (num_batches * batch_size - num_packs)
    own, index = batch_size // num_processes, index_files(paths)
    for process in range(num_processes):
        # The micro-batch of training has no effect; without an index the files are read for one
        shard = ProcessShard(4, process, num_processes)
        packed = eval_batches(paths, SPEC, batch_size, shard=shard, index=index if process else None)
        found = list(CheckedBatches(packed, paths, SPEC, CONFIG))
        assert len(found) == num_batches
        for number, batch in enumerate(found):
            first = number * batch_size + process * own
            assert rows(batch) == wanted[first : first + own]
            is_empty = np.array([row == empty for row in rows(batch)])
            assert not any(values[is_empty].any() for values in batch.values())
            assert {name: (values.dtype, len(values)) for name, values in batch.items()} == {
                name: (values.dtype, own) for name, values in whole.items()
            }


def test_sources_name_the_packs_of_a_share(files, written):
    shard = ProcessShard(8, 1, 2)
    index = index_files(files)
    for packed in (
        itertools.islice(train_batches(index, SPEC, STEP, SEED, 33, shard=shard), 5),
        eval_batches(files, SPEC, 8, shard=shard, index=index),
    ):
        num_checked = 0
        batches = CheckedBatches(packed, files, SPEC, CONFIG)
        for batch in batches:
            packs = batches.packs(index)
            assert rows(batch)[: len(packs)] == [written[pack] for pack in packs]
            named = [(path, number) for path, numbers in batches.sources.items() for number in numbers]
            starts = dict(zip(files, index.starts.tolist(), strict=False))
            assert sorted(starts[path] + number - 1 for path, number in named) == sorted(packs)
            num_checked += len(packs)
        assert num_checked >= NUM_PACKS // 2 - 4


@pytest.mark.parametrize(
    ("make", "name", "received"),
    [
        (lambda files: ProcessShard(6, 0, 4), "micro_batch_size", "4 processes, micro_batch_size=6"),
        (
            lambda files: eval_batches(files, SPEC, 6, shard=ProcessShard(4, 0, 4)),
            "eval_batch_size",
            "4 processes, eval_batch_size=6",
        ),
        (
            lambda files: train_batches(index_files(files), SPEC, 12, 0, 5, shard=ProcessShard(8, 0, 4)),
            "train_batch_size",
            "micro_batch_size=8, train_batch_size=12",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(files, make, name, received):
    with pytest.raises(InputError, match=rf"must divide `{name}`. Received: {received}\.$"):
        make(files)
