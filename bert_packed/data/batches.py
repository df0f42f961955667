"""Batches as NumPy arrays, checked against the model and read ahead in a thread; B packs per batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from bert_packed.core.settings import InputError
from bert_packed.objectives.features import RECORDED
from bert_packed.records import tfrecords
from bert_packed.records.examples import parse_examples


class CheckedBatches(Iterator):
    """Iterator over a dataset's batches: dicts of int32 and float32 arrays with ids within the model's
    tables.

    `dataset` is from `train_batches` or `eval_batches`, with `files`, `spec` and `features` as there.

    Raises:
        InputError: a record is damaged, has another shape, has an id outside the model's tables, or continues
            a pack that it does not follow.
    """

    def __init__(self, dataset, files, spec, model_config, features=RECORDED):
        self._files = files
        self._last = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._batches = self._read(dataset, files, spec, model_config, features)

    def __next__(self):
        batch, self._last = next(self._batches)
        return batch

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

    @staticmethod
    def _read(dataset, files, spec, model_config, features):
        limits = {one: one.limit(model_config, spec) for one in features if one.limit}
        beginning = [one for one in features if one.begins_at_0]
        try:
            for batch, sources in dataset.as_numpy_iterator():
                for feature, limit in limits.items():
                    values = batch[feature.name]
                    if values.min() < 0 or values.max() >= limit:
                        _refuse(feature, values, limit, sources, files)
                for feature in beginning:
                    _check_beginnings(feature, batch[feature.name], sources, files)
                yield batch, sources
        except tf.errors.OpError as error:
            _find_damage(files, spec, features)
            raise InputError(
                f"the records of {files[0]} and others could not be read: {error.message}"
            ) from error


def _refuse(feature, values, limit, sources, files):
    row = int(np.argmax(np.any((values < 0) | (values >= limit), axis=-1)))
    wrong = values[row][(values[row] < 0) | (values[row] >= limit)][0]
    raise InputError(
        f"{files[sources[0][row]]}, record {sources[1][row]}: every value of {feature.record_name} must be "
        f"from 0 and below {feature.limit_name}={limit}. Received: {wrong}."
    )


def _check_beginnings(feature, values, sources, files):
    goes_on = np.flatnonzero(values[:, 0])
    if len(goes_on):
        row = int(goes_on[0])
        raise InputError(
            f"{files[sources[0][row]]}, record {sources[1][row]}: {feature.record_name} must begin at 0, "
            "but in training on rows of --split_sequences, whose manifest.json lies beside them. "
            f"Received: {values[row, 0]}."
        )


def _find_damage(files, spec, features):
    """Read all files, to raise the `InputError` of the first damaged record, if any."""
    lengths = {feature.record_name: spec.size(feature.length) for feature in features}
    for path in files:
        for batch in tfrecords.read_batches(path):
            parse_examples(batch, lengths)


class ReadAhead(Iterator):
    """Iterator over endless batches; a thread prepares the next one while the device computes."""

    def __init__(self, batches):
        self._batches = batches
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._next = self._thread.submit(self._read)
        self._sources = {}

    def __next__(self):
        batch, self._sources = self._next.result()  # raises the thread's errors
        self._next = self._thread.submit(self._read)
        return batch

    @property
    def sources(self):
        return self._sources

    def _read(self):
        return next(self._batches), self._batches.sources
