"""Histograms of sequence lengths: from a file of one, or counted in unpacked records."""

import os

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.packing.histogram import known_histogram_names, load_histogram, load_known_histogram
from bert_packed.schema import CAUSAL_LM


def read_histogram(histogram, input_file):
    """Count lengths as they are on disk, also those over any S: int64 `[L]`, L the longest.

    Args:
        histogram: JSON file, or the name of a histogram that comes with the package; "" to read records.
        input_file: Comma-separated paths or globs of unpacked records.

    Raises:
        InputError: the file is no histogram, a record is damaged, or there is no sequence at all.
    """
    counts = _read_json(histogram) if histogram else _count_records(input_file)
    if not counts.any():
        name, path = ("histogram", histogram) if histogram else ("input_file", input_file)
        raise InputError(f"`{name}` must count a sequence. Received: {path}, which counts none.")
    return counts


def _count_records(input_file):
    from bert_packed.records.first_records import find_common_objective
    from bert_packed.records.inputs import find_files
    from bert_packed.records.read_bert import read_unpacked
    from bert_packed.records.read_causal import read_causal  # TensorFlow: a histogram needs none

    counts = np.zeros(0, np.int64)
    paths = find_files(input_file, "input_file")
    read = read_causal if find_common_objective(paths) == CAUSAL_LM else read_unpacked
    for path in paths:
        for batch in read(path):
            more = np.bincount(batch["lengths"])[1:]
            if len(more) > len(counts):
                counts, more = more, counts
            counts[: len(more)] += more
    return counts


def _read_json(name):
    try:
        if name in known_histogram_names() and not os.path.exists(name):
            return load_known_histogram(name)
        return load_histogram(name)
    except ValueError as error:
        raise InputError(str(error)) from error
