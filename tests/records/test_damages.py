"""Damage under right checksums, in any records, ends in wrong sequences or in more than one line."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from causal_files import write_causal
from unpacked_records import make_features, read_records, write_features

from bert_packed.assembly.feature_packs import FeatureKind, parse_features
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_ragged
from bert_packed.records.read_bert import read_packed, read_unpacked
from bert_packed.records.read_causal import read_causal, read_packed_causal, read_parts
from bert_packed.records.sequences import ORIGINS, take
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack

S = 16
NUM_RECORDS = 12


def many(quick, slow):
    """Trials of each kind of damage: some in the quick suite, in the slow one more than a thousand in all."""
    return pytest.mark.parametrize("num_trials", [quick, pytest.param(slow, marks=pytest.mark.slow)])


def flip(content, rng):
    place = rng.integers(len(content))
    return content[:place] + bytes([content[place] ^ (1 << rng.integers(8))]) + content[place + 1 :]


def truncate(content, rng):
    return content[: rng.integers(len(content))]


def duplicate(content, rng):
    first, last = np.sort(rng.integers(0, len(content) + 1, 2))
    return content[:last] + content[first:]


def swap(content, rng):
    first, last = rng.integers(0, len(content), 2)
    swapped = list(content)
    swapped[first], swapped[last] = swapped[last], swapped[first]
    return bytes(swapped) if isinstance(content, bytes) else swapped


def drop(content, rng):
    first, last = np.sort(rng.integers(0, len(content) + 1, 2))
    return content[:first] + content[last:]


def replace(records, rng):
    """One lost, another twice: not even their number is wrong."""
    first, last = rng.integers(0, len(records), 2)
    return [*records[:first], records[last], *records[first + 1 :]]


def lengths(rng):
    return rng.integers(2, S + 1, NUM_RECORDS)


def write_bert(path, rng):
    write_features(path, make_features(lengths(rng), S))


def write_ids(path, rng):
    """Records of one feature, as --features reads them."""
    columns = [rng.integers(1, 99, size) for size in lengths(rng)]
    counts = np.array([len(values) for values in columns])
    tfrecords.write_records(path, serialize_ragged({"ids": (np.concatenate(columns), counts)}))


def write_packs(write, **settings):
    """Packs of two sequences, of what `write` writes."""

    def write_packed(path, rng):
        folder = Path(path).parent / "made"
        folder.mkdir()
        for seed in range(2):
            write(folder / f"{seed}.tfrecord", np.random.default_rng(seed))
        given = {"input_file": f"{folder}/*.tfrecord", "output_dir": f"{folder}/out", "num_shards": 1}
        pack(PackConfig(max_seq_length=2 * S, max_sequences_per_pack=2, num_workers=1, **given, **settings))
        (packed,) = (folder / "out").glob("*.tfrecord")
        shutil.move(packed, path)
        shutil.rmtree(folder)

    return write_packed


def write_causal_records(path, rng):
    write_causal(path, lengths(rng), int(rng.integers(99)))


def read_ids(path):
    return (sequences for sequences, *_ in FeatureKind(parse_features(f"ids:int:{S}"), "error").read(path))


READERS = {
    "BERT": (write_bert, read_unpacked),
    "packs of BERT": (write_packs(write_bert), read_packed),
    "causal": (write_causal_records, read_causal),
    "causal packs": (write_packs(write_causal_records), read_packed_causal),
    "parts of sequences": (
        write_packs(write_causal_records),
        lambda path: (parts for parts, _ in read_parts(path)),
    ),
    "features": (write_ids, read_ids),
}


def contents(parts):
    """Content of each record: dict from its number to a list, one of its sequences after the other."""
    found = {}
    for sequences in parts:
        for row, number in enumerate(sequences["record_numbers"].tolist()):
            one = take(sequences, np.array([row]))
            values = [values.tolist() for name, values in one.columns.items() if name not in ORIGINS]
            found.setdefault(number, []).append(values)
    return found


class Original:
    """An undamaged file, its records, and what is in each."""

    def __init__(self, path, write, read):
        self.path, self.read = str(path), read
        write(self.path, np.random.default_rng(0))
        self.records = read_records(self.path)
        self.contents = list(contents(read(self.path)).values())
        assert len(self.contents) == len(self.records) == len(set(self.records)) > 5

    def check_error(self, error):
        assert self.path in str(error) and "\n" not in str(error)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request):
    return Original(tmp_path_factory.mktemp("whole") / "in.tfrecord", *READERS[request.param])


@pytest.fixture
def original(tmp_path, whole):
    """The same file in a folder of the test."""
    found = copy.copy(whole)
    found.path = str(tmp_path / "in.tfrecord")
    tfrecords.write_records(found.path, whole.records)
    return found


@many(6, 75)
@pytest.mark.parametrize("damage", [flip, swap, duplicate, drop])
@pytest.mark.parametrize("whole", READERS, indirect=True)
def test_damage_under_right_checksums_stays_in_its_record(original, damage, num_trials):
    """Damage from before the checksums were made: an error, or a sequence that obeys all rules.

    The first record decides which features the others need, so it stays whole here.
    """
    rng, num_errors = np.random.default_rng(1), 0
    for _ in range(num_trials):
        damaged, index = list(original.records), int(rng.integers(1, len(original.records)))
        damaged[index] = damage(damaged[index], rng)
        tfrecords.write_records(original.path, damaged)
        try:
            found = list(contents(original.read(original.path)).values())
        except InputError as error:
            original.check_error(error)
            num_errors += 1
            continue
        others = [*original.contents[:index], *original.contents[index + 1 :]]
        assert [*found[:index], *found[index + 1 :]] == others or found == others  # a pack of nothing
    assert num_errors > 0


@pytest.mark.parametrize("damage", [flip, swap, duplicate, drop])
@pytest.mark.parametrize("whole", READERS, indirect=True)
def test_a_damaged_first_record_is_read_or_named(original, damage):
    rng = np.random.default_rng(2)
    for _ in range(6):
        first = damage(original.records[0], rng)
        tfrecords.write_records(original.path, [first, *original.records[1:]])
        try:
            contents(original.read(original.path))
        except InputError as error:
            original.check_error(error)


@many(3, 40)
@pytest.mark.parametrize("damage", [truncate, duplicate, drop, swap, replace])
@pytest.mark.parametrize("whole", ["BERT", "features", "causal"], indirect=True)
def test_packing_what_a_manifest_does_not_know(tmp_path, original, damage, num_trials):
    """If a manifest says what the file was, any other whole records are an error, and nothing is written."""
    entry = {"name": "in.tfrecord", "num_records": NUM_RECORDS, "sha256": storage.file_sha256(original.path)}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": [entry]}))
    settings = {"input_file": original.path, "num_workers": 1, "num_shards": 1}
    settings |= {"features": f"ids:int:{S}"} if original.read is read_ids else {"max_seq_length": S}
    rng, num_errors = np.random.default_rng(1), 0
    for trial in range(num_trials):
        out, damaged = tmp_path / f"out-{trial}", damage(original.records, rng)
        tfrecords.write_records(original.path, damaged)
        if damaged == original.records:
            assert pack(PackConfig(output_dir=str(out), **settings))["num_sequences"] == NUM_RECORDS
            continue
        with pytest.raises(InputError) as error:
            pack(PackConfig(output_dir=str(out), **settings))
        original.check_error(error.value)
        assert not out.exists()
        num_errors += 1
    assert num_errors > num_trials * 0.4
