"""`tf.data` pipelines of fixed-shape batches: for training, for evaluation, and packed online.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack, W processes.
"""

import dataclasses
import functools
import itertools

import numpy as np
import tensorflow as tf

from bert_packed import schema
from bert_packed.assembly.online_assembly import assemble_stream
from bert_packed.data.process_shards import WHOLE
from bert_packed.data.read_order import IN_ORDER_PACKS, Spans, find_spans, index_files, read_order
from bert_packed.objectives.features import BATCH_NAMES, RECORDED
from bert_packed.packing.online import OnlinePacker
from bert_packed.records.read_bert import read_unpacked

READ_AHEAD = 2**18  # bytes per read of a file
READERS = 8  # spans of packs that are read in parallel
from_variant = tf.data.experimental.from_variant


def train_batches(
    index, spec, batch_size, seed, shuffle_buffer_size, first_step=0, features=RECORDED, shard=WHOLE
):
    """Endless shuffled batches, whose order follows from the seed (`read_order.py`).

    Every epoch reads each pack once. Batches run across the end of an epoch, so no pack is dropped.

    Args:
        index, spec: `PackIndex` and `PackSpec` of packed TFRecord files.
        batch_size: B, packs per step of all processes.
        shuffle_buffer_size: Packs that are shuffled together; 1 for the order on disk. Memory holds twice as
            many; each of W processes holds a W-th of them.
        first_step: Number of batches to skip, without reading them.
        features: `Feature`s to read.
        shard: `ProcessShard`, this process's part of each step.

    Returns a `tf.data.Dataset` of (batch, sources), as from `_decode`, with B / W packs. Raises `InputError`
    unless the shard's micro-batches divide B.
    """
    own_size = shard.batch_size(batch_size)
    first = first_step * batch_size

    def blocks():
        return shard.of_blocks(read_order(index.num_packs, seed, shuffle_buffer_size, first), first)

    packs = _read_packs(index, blocks).batch(own_size, drop_remainder=True)
    decode = functools.partial(_decode, spec=spec, features=features)
    return packs.map(decode, 2).prefetch(2)


def eval_batches(files, spec, batch_size, features=RECORDED, shard=WHOLE, index=None):
    """Each pack once, in the order on disk; the last batch is filled with empty packs (.).

    6 packs in batches of 4, for two processes:

        process 0    0 1    4 5
        process 1    2 3    . .

    Args:
        files, spec, features: As in `train_batches`.
        batch_size: B, packs that all processes compute at once.
        shard: `ProcessShard`, whose micro-batches are ignored. All processes have equally many batches.
        index: `PackIndex` of the files, needed for several processes only; None to read the files for it.

    Returns a `tf.data.Dataset` of (batch, sources), with B / W packs. Raises `InputError` unless W divides B.
    """
    shard = shard.of_evaluation(batch_size)
    own_size = shard.batch_size(batch_size)
    if shard.num_processes == 1:
        batches = _read_in_order(files, tf.range(len(files), dtype=tf.int64)).batch(own_size)
    else:
        batches = _read_shard(index or index_files(files), shard, own_size)
    decode = functools.partial(_decode, spec=spec, features=features)
    fill = functools.partial(_fill, batch_size=own_size)
    return batches.map(decode, 2).map(lambda batch, sources: (fill(batch), sources)).prefetch(2)


def chosen_packs(index, spec, packs, features=RECORDED):
    """One batch of chosen packs: a `tf.data.Dataset` of (batch, sources), as from `eval_batches`.

    `packs` has their numbers over all files of the `PackIndex`, int64 `[B]`; the others are as there.
    """
    decode = functools.partial(_decode, spec=spec, features=features)
    return _read_packs(index, lambda: [packs]).batch(len(packs)).map(decode)


def online_batches(
    files, spec, batch_size, num_epochs=None, buffer_size=10_000, max_age=None, policy="best_fit"
):
    """Batches of unpacked records, packed while they are read, where no plan can be made beforehand.

    The same files give the same batches, so `skip` resumes.

    Args:
        files: Paths of unpacked TFRecord files, google-research/bert's format.
        spec: `PackSpec` of the packs; one with more than P predictions is split.
        num_epochs: None for an endless stream. The last batch of a finite one is filled with empty packs.
        buffer_size, max_age, policy: As in `OnlinePacker`.

    Returns a `tf.data.Dataset` of dicts of int32 and float32 tensors `[B, ...]` of static shape. Raises
    `ValueError` without files, or for a wrong setting of the packer.
    """
    if not files:
        raise ValueError("`files` must name at least one file. Received: none.")  # else an endless wait

    def make_packer():
        return OnlinePacker(
            spec.max_seq_length,
            spec.max_sequences_per_pack,
            buffer_size=buffer_size,
            max_age=max_age,
            policy=policy,
        )

    make_packer()  # raises for a wrong setting here, not in TensorFlow at the first batch

    def batches():
        epochs = itertools.count() if num_epochs is None else range(num_epochs)
        for _ in epochs:
            for path in files:
                yield from read_unpacked(path)

    def packs():
        for features in assemble_stream(batches(), make_packer(), spec):
            yield {BATCH_NAMES[name]: values for name, values in features.items()}

    signature = {
        ours: tf.TensorSpec(
            (None, *spec.shape(name)), tf.float32 if name in schema.FLOAT_FEATURES else tf.int32
        )
        for name, ours in BATCH_NAMES.items()
    }
    blocks = tf.data.Dataset.from_generator(packs, output_signature=signature)
    fill = functools.partial(_fill, batch_size=batch_size)
    return blocks.rebatch(batch_size).map(fill).prefetch(2)


def _read_in_order(files, order):
    """Dataset of (serialized record, index of its file, record number from 1)."""
    paths = tf.constant(files)

    def read_file(index):
        numbered = tf.data.TFRecordDataset(paths[index]).enumerate(start=1)
        return numbered.map(lambda number, record: (record, index, number))

    return tf.data.Dataset.from_tensor_slices(order).flat_map(read_file)


def _read_shard(index, shard, own_size):
    """As `_read_in_order`, for one process's packs, in batches of at most `own_size`."""

    def blocks():
        starts = range(0, index.num_packs, IN_ORDER_PACKS)
        return shard.of_blocks(
            np.arange(first, min(first + IN_ORDER_PACKS, index.num_packs)) for first in starts
        )

    batches = _read_packs(index, blocks).batch(own_size)
    num_before = (index.num_packs - 1) // shard.micro_batch_size * shard.micro_batch_size
    if shard.holds(np.arange(num_before, index.num_packs)).any():
        return batches
    # The others compute one more batch, whose collectives wait for this process too
    empty = (tf.zeros([0], tf.string), tf.zeros([0], tf.int64), tf.zeros([0], tf.int64))
    return batches.concatenate(tf.data.Dataset.from_tensors(empty))


def _read_packs(index, blocks):
    """As `_read_in_order`, for blocks of pack numbers, int64 `[n]`, each read together."""
    names = [field.name for field in dataclasses.fields(Spans)]

    def spans():
        for packs in blocks():
            if len(packs):
                on_disk = np.sort(packs)
                found = find_spans(index, on_disk)
                yield *(getattr(found, name) for name in names), np.searchsorted(on_disk, packs)

    signature = (tf.TensorSpec([None], tf.int64),) * (len(names) + 1)
    dataset = tf.data.Dataset.from_generator(spans, output_signature=signature)
    return dataset.map(functools.partial(_read_block, tf.constant(index.files))).prefetch(1).unbatch()


def _read_block(paths, files, offsets, counts, numbers, num_bytes, order):
    """Records, file indices and record numbers, `[n]`, of the packs of `Spans`, permuted by `order`."""

    def read_span(path, offset, count, size):
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type="", buffer_size=size, byte_offsets=[offset]
        )
        return from_variant(records, tf.TensorSpec([], tf.string)).take(count)

    spans = (tf.gather(paths, files), offsets, counts, tf.minimum(num_bytes, READ_AHEAD))
    num_packs = tf.size(order, tf.int64)
    # Several files are open at once, to hide the latency of object stores. No span exceeds `block_length`,
    # so that each is complete before the next
    records = tf.data.Dataset.from_tensor_slices(spans).interleave(
        read_span, READERS, block_length=num_packs, num_parallel_calls=READERS, deterministic=True
    )
    records = records.batch(num_packs).get_single_element()
    before = tf.repeat(tf.cumsum(counts, exclusive=True), counts)
    record_numbers = tf.repeat(numbers, counts) + tf.range(num_packs) - before
    return tuple(tf.gather(column, order) for column in (records, tf.repeat(files, counts), record_numbers))


def _decode(serialized, file_indices, numbers, spec, features):
    """Parse packs: dict of int32 and float32 tensors `[B, ...]`, and (file indices, record numbers)."""
    names = {feature.record_name: feature.name for feature in features}
    wanted = {name: tf.io.FixedLenFeature(spec.shape(name), schema.dtype(name)) for name in names}
    batch = {
        names[name]: tf.cast(values, tf.int32) if values.dtype == tf.int64 else values
        for name, values in tf.io.parse_example(serialized, wanted).items()
    }
    if {"sequence_ids", "prediction_positions", "prediction_sequences"} <= batch.keys():
        batch["prediction_sequences"] = _owners(batch)
    return batch, (file_indices, numbers)


def _owners(batch):
    """The sequence of each prediction, float32 `[B, P]`, also in records whose weights are binary.

    sequence_ids [1 1 2 2]   positions [1 3 0]   weights [1 1 0]   ->   [1 2 0]
    """
    # Wrong weights and positions stay, for `CheckedBatches` to refuse them with the feature's name
    weights_BP, last = batch["prediction_sequences"], batch["sequence_ids"].shape[1] - 1
    places_BP = tf.clip_by_value(batch["prediction_positions"], 0, last)
    owners_BP = tf.gather(batch["sequence_ids"], places_BP, batch_dims=1)
    is_binary_B1 = tf.reduce_all((weights_BP == 0) | (weights_BP == 1), axis=1, keepdims=True)
    return tf.where(is_binary_B1, weights_BP * tf.cast(owners_BP, tf.float32), weights_BP)


def _fill(batch, batch_size):
    """Append empty packs (all zeros) until there are B."""

    def fill(values):
        missing = batch_size - tf.shape(values)[0]
        filled = tf.pad(values, [[0, missing]] + [[0, 0]] * (values.shape.rank - 1))
        return tf.ensure_shape(filled, (batch_size, *values.shape[1:]))

    return {name: fill(values) for name, values in batch.items()}
