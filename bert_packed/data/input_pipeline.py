"""Iterators of fixed-shape batches: for training, for evaluation, and packed online.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, W processes.
"""

import itertools

import numpy as np

from bert_packed import schema
from bert_packed.assembly.assignment import fill_rows
from bert_packed.assembly.online_assembly import assemble_stream
from bert_packed.data.read_order import (
    IN_ORDER_PACKS,
    WHOLE,
    index_files,
    read_blocks,
    read_order,
    read_packs,
)
from bert_packed.objectives.features import BATCH_NAMES, RECORDED
from bert_packed.packing.online import OnlinePacker
from bert_packed.records.examples import parse_examples
from bert_packed.records.read_bert import read_unpacked
from bert_packed.records.tfrecords import join_records, read_batches

FILES, NUMBERS = "file indices", "record numbers"  # of the packs of a batch, among its arrays


def train_batches(
    index,
    spec,
    batch_size,
    seed,
    shuffle_buffer_size,
    first_step=0,
    features=RECORDED,
    shard=WHOLE,
    arrange=None,
):
    """Endless shuffled batches, whose order follows from the seed (`read_order.py`).

    Every epoch reads each pack once. Batches run across the end of an epoch, so no pack is dropped. Memory
    holds two shuffle buffers, divided among the W processes; the first `first_step` batches are not read.
    `arrange` is a function from the blocks of the order to those of another, or None.

    Returns an iterator of (batch, sources), as from `_decode`, with B / W packs. Raises `InputError`: at once
    unless the shard's micro-batches divide B, and later where a record is damaged.
    """
    own_size = shard.batch_size(batch_size)
    first = first_step * batch_size
    order = read_order(index.num_packs, seed, shuffle_buffer_size, first)
    blocks = shard.of_blocks(arrange(order) if arrange else order, first)
    return _decode_batches(read_blocks(index, blocks), own_size, index.files, spec, features)


def eval_batches(files, spec, batch_size, features=RECORDED, shard=WHOLE, index=None):
    """Each pack once, in the order on disk; the last batch is filled with empty packs (.).

    6 packs in batches of 4, for two processes:

        process 0    0 1    4 5
        process 1    2 3    . .

    All processes have equally many batches; without an `index`, several of them read the files for it.

    Returns an iterator of (batch, sources), with B / W packs. Raises `InputError`: at once unless W divides
    B, and later where a record is damaged.
    """
    shard = shard.of_evaluation(batch_size)
    own_size = shard.batch_size(batch_size)
    records, has_empty_batch = _read_in_order(files), False
    if shard.num_processes > 1:
        index = index or index_files(files)
        starts = range(0, index.num_packs, IN_ORDER_PACKS)
        blocks = (np.arange(first, min(first + IN_ORDER_PACKS, index.num_packs)) for first in starts)
        records = read_blocks(index, shard.of_blocks(blocks))
        num_before = (index.num_packs - 1) // batch_size * batch_size
        # The other processes compute one more batch, whose collectives wait for this process too
        has_empty_batch = not shard.holds(np.arange(num_before, index.num_packs)).any()
    return _filled_batches(records, own_size, files, spec, features, has_empty_batch)


def chosen_packs(index, spec, packs, features=RECORDED):
    """One (batch, sources), as from `eval_batches`, of packs numbered over all files, int64 `[B]`."""
    yield _decode(read_packs(index, packs), index.files, spec, features)


def online_batches(
    files, spec, batch_size, num_epochs=None, buffer_size=10_000, max_age=None, policy="best_fit"
):
    """Batches of unpacked records, packed while they are read, where no plan can be made beforehand.

    The same files give the same batches, so `itertools.islice(batches, num_read, None)` resumes.

    Args:
        files: Paths of unpacked TFRecord files, google-research/bert's format.
        spec: `PackSpec` of the packs; one with more than P predictions is split.
        num_epochs: Passes over the files, whose last batch is filled with empty packs; None for no end.
        buffer_size, max_age, policy: Arguments of `OnlinePacker`.

    Returns an iterator of dicts of int32 and float32 arrays `[B, ...]`. Raises `ValueError` without files, or
    for a wrong setting of the packer.
    """
    if not files:
        raise ValueError("`files` must name at least one file. Received: none.")  # else an endless wait

    settings = {"buffer_size": buffer_size, "max_age": max_age, "policy": policy}
    packer = OnlinePacker(spec.max_seq_length, spec.max_sequences_per_pack, **settings)
    epochs = itertools.count() if num_epochs is None else range(num_epochs)
    sequences = (batch for _ in epochs for path in files for batch in read_unpacked(path))
    packs = assemble_stream(sequences, packer, spec)
    named = ({BATCH_NAMES[name]: values for name, values in of_packs.items()} for of_packs in packs)
    return (_fill(batch, batch_size) for batch in _rebatch(named, batch_size))


def _read_in_order(files):
    """Yield lists of records as `read_packs` returns them, in the order on disk, without an index."""
    for file, path in enumerate(files):
        for batch in read_batches(path):
            yield [(record, file, number) for number, record in enumerate(batch.to_list(), batch.number)]


def _decode_batches(parts, batch_size, files, spec, features):
    """Yield batches of `batch_size` records of lists of records; the last one may have fewer."""
    # Records are decoded in parts, since one record takes about as long as fifty
    decoded = (_decode(records, files, spec, features) for records in parts if records)
    named = ({**batch, FILES: sources[0], NUMBERS: sources[1]} for batch, sources in decoded)
    for batch in _rebatch(named, batch_size):
        sources = batch.pop(FILES), batch.pop(NUMBERS)
        yield batch, sources


def _rebatch(blocks, batch_size):
    """Cut dicts of arrays `[n, ...]` into dicts of arrays `[batch_size, ...]`; the last may be shorter."""
    held, num_held = [], 0
    for block in blocks:
        held.append(block)
        num_held += len(next(iter(block.values())))
        if num_held < batch_size:
            continue
        whole, num_taken = _join(held), num_held // batch_size * batch_size
        for first in range(0, num_taken, batch_size):
            yield {name: values[first : first + batch_size] for name, values in whole.items()}
        held, num_held = [{name: values[num_taken:] for name, values in whole.items()}], num_held - num_taken
    if num_held:
        yield _join(held)


def _join(blocks):
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _filled_batches(records, batch_size, files, spec, features, has_empty_batch):
    for batch, sources in _decode_batches(records, batch_size, files, spec, features):
        yield _fill(batch, batch_size), sources
    if has_empty_batch:
        empty = {}
        for one in features:
            dtype = np.float32 if one.record_name in schema.FLOAT_FEATURES else np.int32
            empty[one.name] = np.zeros((batch_size, spec.size(one.length)), dtype)
        yield empty, (np.zeros(0, np.int64),) * 2


def _decode(records, files, spec, features):
    """Parse packs: dict of int32 and float32 arrays `[B, ...]`, and (file indices, record numbers), `[B]`."""
    serialized, file_indices, numbers = zip(*records, strict=True)
    lengths = {one.record_name: spec.size(one.length) for one in features}
    origins = [(files[file], number) for file, number in zip(file_indices, numbers, strict=True)]
    found = parse_examples(join_records(serialized), lengths, narrow=lengths, origins=origins)
    batch = {
        one.name: values if values.dtype == np.float32 else values.astype(np.int32)
        for one in features
        for values in [found[one.record_name]]
    }
    if {"sequence_ids", "prediction_positions", "prediction_sequences"} <= batch.keys():
        batch["prediction_sequences"] = _owners(batch)
    return batch, (np.array(file_indices), np.array(numbers))


def _owners(batch):
    """The sequence of each prediction, float32 `[B, P]`, also in records whose weights are binary.

    sequence_ids [1 1 2 2]   positions [1 3 0]   weights [1 1 0]   ->   [1 2 0]
    """
    # Wrong weights and positions stay, for `CheckedBatches` to refuse them with the feature's name
    weights_BP, last = batch["prediction_sequences"], batch["sequence_ids"].shape[1] - 1
    places_BP = np.clip(batch["prediction_positions"], 0, last)
    owners_BP = np.take_along_axis(batch["sequence_ids"], places_BP, axis=1)
    is_binary_B1 = ((weights_BP == 0) | (weights_BP == 1)).all(axis=1, keepdims=True)
    return np.where(is_binary_B1, weights_BP * owners_BP.astype(np.float32), weights_BP)


def _fill(batch, batch_size):
    """Append empty packs (all zeros) until there are B."""
    return {name: fill_rows(values, batch_size) for name, values in batch.items()}
