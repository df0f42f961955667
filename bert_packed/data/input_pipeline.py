"""Records to batches of fixed shape: endless and resumable to train, complete to evaluate, packed online.

Legend: B packs per batch, S pack length, P predictions per pack, K sequences per pack.
"""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from bert_packed.objectives.features import BATCH_NAMES, RECORDED
from data_gen import schema
from data_gen.assembly.online_assembly import pack_stream
from data_gen.cli.settings import InputError
from data_gen.packing.online import OnlinePacker
from data_gen.records import tfrecords
from data_gen.records.read_unpacked import read_unpacked


def train_batches(
    files, num_packs, spec, batch_size, seed, shuffle_buffer_size, first_step=0, features=RECORDED
):
    """Endless batches in an order that follows from the seed, from any step on.

    Every epoch reads each pack once, files and packs shuffled anew; batches run across the end of an epoch,
    so no pack is dropped.

    Args:
        files: Paths of packed TFRecord files.
        num_packs: Packs in all files together.
        spec: `schema.PackSpec` of the files.
        batch_size: B.
        seed: Whole number.
        shuffle_buffer_size: Packs held in memory and shuffled together; 1 for the order on disk.
        first_step: Batches to leave out, as if they had been read before.
        features: What to read, `Feature`s, those of an objective; others in the records are passed over.

    Returns:
        `tf.data.Dataset` of (batch, sources), as `_decode` makes them.
    """
    epoch, num_read = divmod(first_step * batch_size, num_packs)

    def read_epoch(number):
        order = tf.range(len(files), dtype=tf.int64)
        if shuffle_buffer_size == 1:
            return _read_in_order(files, order)
        # Block 0 of an epoch is its order of files. Not `Dataset.shuffle`: its order follows from
        # TensorFlow's global seed as well as from the one given
        order = tf.random.experimental.stateless_shuffle(order, seed=[seed, number * 2**32])

        def shuffle_block(block, packs):
            places = tf.range(tf.shape(packs[0])[0])
            block_seed = [tf.constant(seed, tf.int64), number * 2**32 + block]
            places = tf.random.experimental.stateless_shuffle(places, seed=block_seed)
            return tuple(tf.gather(column, places) for column in packs)

        blocks = _read_in_order(files, order).batch(shuffle_buffer_size)
        return blocks.enumerate(start=1).map(shuffle_block).unbatch()

    packs = tf.data.Dataset.range(epoch, tf.int64.max).flat_map(read_epoch).skip(num_read)
    decode = functools.partial(_decode, spec=spec, features=features)
    return packs.batch(batch_size, drop_remainder=True).map(decode, 2).prefetch(2)


def eval_batches(files, spec, batch_size, features=RECORDED):
    """Every pack once, in the order on disk; the last batch is filled with empty packs.

    Args:
        files, spec, batch_size, features: As in `train_batches`.

    Returns:
        `tf.data.Dataset` of (batch, sources), all batches of size B.
    """
    packs = _read_in_order(files, tf.range(len(files), dtype=tf.int64)).batch(batch_size)
    decode = functools.partial(_decode, spec=spec, features=features)
    fill = functools.partial(_fill, batch_size=batch_size)
    return packs.map(decode, 2).map(lambda batch, sources: (fill(batch), sources)).prefetch(2)


def online_batches(
    files, spec, batch_size, num_epochs=None, buffer_size=10_000, max_age=None, policy="best_fit"
):
    """Batches of unpacked records, packed while they are read: for streams that no plan can be made for.

    The same files give the same batches, so `skip` resumes. Sequences arrive in the order of the files; the
    buffer mixes them only as packing asks.

    Args:
        files: Paths of unpacked TFRecord files, google-research/bert's format.
        spec: `schema.PackSpec` wanted; a pack with more than P predictions is split.
        batch_size: B.
        num_epochs: Times that the files are read; None for ever. The last batch of a finite stream is filled
            with empty packs.
        buffer_size, max_age, policy: As in `packing.online.OnlinePacker`.

    Returns:
        `tf.data.Dataset` of dicts of int32 and float32 tensors `[B, ...]` of static shape.

    Raises:
        ValueError: there is no file, or a setting of the packer breaks its rule.
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

    make_packer()  # a wrong setting shows here, and not as an error of TensorFlow at the first batch

    def parts():
        epochs = itertools.count() if num_epochs is None else range(num_epochs)
        for _ in epochs:
            for path in files:
                yield from read_unpacked(path)

    def packs():
        for features in pack_stream(parts(), make_packer(), spec):
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


def checked(dataset, files, spec, model_config, features=RECORDED) -> Iterator[dict]:
    """Iterate over a dataset's batches, as NumPy arrays that are known to fit the model.

    Args:
        dataset: From `train_batches` or `eval_batches`.
        files, spec, features: What it reads.
        model_config: `ModelConfig`; its table sizes are the limits of ids.

    Yields:
        Dict of int32 and float32 arrays.

    Raises:
        InputError: a record is damaged, of another shape, or has an id that the model has no row for.
    """
    limits = {one: one.limit(model_config, spec) for one in features if one.limit}
    try:
        for batch, sources in dataset.as_numpy_iterator():
            for feature, limit in limits.items():
                values = batch[feature.name]
                if values.min() < 0 or values.max() >= limit:
                    _refuse(feature, values, limit, sources, files)
            yield batch
    except tf.errors.OpError as error:
        _find_damage(files, spec, features)
        raise InputError(
            f"the records of {files[0]} and others could not be read: {error.message}"
        ) from error


def _read_in_order(files, order):
    """Dataset of (serialized record, index of its file, number of the record, from 1)."""
    paths = tf.constant(files)

    def read_file(index):
        numbered = tf.data.TFRecordDataset(paths[index]).enumerate(start=1)
        return numbered.map(lambda number, record: (record, index, number))

    return tf.data.Dataset.from_tensor_slices(order).flat_map(read_file)


def _decode(serialized, file_indices, numbers, spec, features):
    """One batch of serialized packs to a dict of int32 and float32 tensors `[B, ...]`, and their sources."""
    names = {feature.record_name: feature.name for feature in features}
    wanted = {name: tf.io.FixedLenFeature(spec.shape(name), schema.dtype(name)) for name in names}
    batch = {
        names[name]: tf.cast(values, tf.int32) if values.dtype == tf.int64 else values
        for name, values in tf.io.parse_example(serialized, wanted).items()
    }
    return batch, (file_indices, numbers)


def _fill(batch, batch_size):
    """Append empty packs (all zeros) until there are B."""

    def fill(values):
        missing = batch_size - tf.shape(values)[0]
        filled = tf.pad(values, [[0, missing]] + [[0, 0]] * (values.shape.rank - 1))
        return tf.ensure_shape(filled, (batch_size, *values.shape[1:]))

    return {name: fill(values) for name, values in batch.items()}


def _refuse(feature, values, limit, sources, files):
    row = int(np.argmax(np.any((values < 0) | (values >= limit), axis=-1)))
    wrong = values[row][(values[row] < 0) | (values[row] >= limit)][0]
    raise InputError(
        f"{files[sources[0][row]]}, record {sources[1][row]}: every value of {feature.record_name} must be "
        f"from 0 and below {feature.limit_name}={limit}. Received: {wrong}."
    )


def _find_damage(files, spec, features):
    """Read files one after the other and raise the `InputError` of the first damaged record, if any."""
    lengths = {feature.record_name: spec.size(feature.length) for feature in features}
    for path in files:
        first = 1
        for batch in tfrecords.read_batches(path):
            tfrecords.parse_examples(batch, lengths, path, first)
            first += len(batch)
