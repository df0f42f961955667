"""Lengths are counted uncut: over all files and batches of records, or from a histogram's file."""

import itertools
import json

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from bert_packed.core.settings import InputError
from bert_packed.packing.histogram import load_known_histogram
from bert_packed.records import tfrecords
from data_gen.dry_run import read_histogram


def test_lengths_of_all_files_and_batches_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    lengths = {"a": [3, 9, 3], "b": [12, 2, 3, 3, 1], "c": [2]}  # the longest comes late, then shorter ones
    for name, its in lengths.items():
        write_features(tmp_path / f"{name}.tfrecord", make_features(its, 16))
    found = read_histogram("", f"{tmp_path}/*.tfrecord")
    assert found.tolist() == np.bincount([*itertools.chain(*lengths.values())])[1:].tolist()


def test_a_file_precedes_a_known_histogram(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = read_histogram("glue_cola", "")
    assert known.tolist() == load_known_histogram("glue_cola").tolist()
    (tmp_path / "glue_cola").write_text(json.dumps({"lengths": [2], "counts": [5]}))
    assert read_histogram("glue_cola", "").tolist() == [0, 5]


def test_no_sequence_at_all_is_a_mistake(tmp_path):
    path = tmp_path / "none.json"
    for counts in ([0], [0, 0, 0]):
        path.write_text(json.dumps({"lengths": list(range(1, len(counts) + 1)), "counts": counts}))
        with pytest.raises(InputError, match=r"`histogram` must count a sequence\. Received: .*none\.json"):
            read_histogram(str(path), "")
