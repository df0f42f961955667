"""Whatever happens to the bytes of the input, packing ends in one clear error or in the same sequences."""

import json

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_ragged
from bert_packed.records.read_bert import read_packed, read_unpacked
from bert_packed.records.sequences import BERT_LAYOUT, concatenate, content_digests
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
    first, last = np.sort(rng.integers(0, len(content), 2))
    swapped = bytearray(content)
    swapped[first], swapped[last] = swapped[last], swapped[first]
    return bytes(swapped)


def drop(content, rng):
    first, last = np.sort(rng.integers(0, len(content) + 1, 2))
    return content[:first] + content[last:]


def at_records(damage):
    """The damage, at the boundaries of records: nothing in the file itself betrays it."""

    def damage_records(frames, rng):
        return b"".join(damage(frames, rng))

    damage_records.__name__ = f"{damage.__name__}_records"
    return damage_records


def swap_records(frames, rng):
    first, last = rng.integers(0, len(frames), 2)
    frames = list(frames)
    frames[first], frames[last] = frames[last], frames[first]
    return b"".join(frames)


def replace_record(frames, rng):
    """One lost, another twice: not even their number is wrong."""
    first, last = rng.integers(0, len(frames), 2)
    return b"".join([*frames[:first], frames[last], *frames[first + 1 :]])


DAMAGES = [flip, truncate, duplicate, swap, drop]
RECORD_DAMAGES = [
    *(at_records(damage) for damage in (truncate, duplicate, drop)),
    swap_records,
    replace_record,
]


def seed_of(damage):
    return np.random.default_rng([ord(letter) for letter in damage.__name__])


def digests(parts):
    found = content_digests(concatenate(list(parts)), BERT_LAYOUT)
    return [tuple(digest) for digest in found.tolist()]


class Original:
    """An undamaged file, its framed records, and the digest of the sequence in each."""

    def __init__(self, path, read=read_unpacked):
        self.path = path
        with open(path, "rb") as file:
            self.content = file.read()
        self.digests = digests(read(path)) if read else range(NUM_RECORDS)
        sizes = [len(record) + tfrecords.FRAME_BYTES for record in tfrecords.read_records(path)]
        ends = np.cumsum(sizes)
        self.frames = [self.content[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]
        assert b"".join(self.frames) == self.content and len(set(self.digests)) == NUM_RECORDS

    def write(self, content):
        with open(self.path, "wb") as file:
            file.write(content)

    def whole_records(self, content):
        """The digests of a file of whole records of the original, in order; None for any other file."""
        found, place = [], 0
        while place < len(content):
            for frame, digest in zip(self.frames, self.digests, strict=True):
                if content.startswith(frame, place):
                    found.append(digest)
                    place += len(frame)
                    break
            else:
                return None
        return found or None

    def write_manifest(self):
        entry = {
            "name": "in.tfrecord",
            "num_records": NUM_RECORDS,
            "sha256": storage.file_sha256(self.path),
        }
        with open(self.path.replace("in.tfrecord", "manifest.json"), "w") as file:
            json.dump({"files": [entry]}, file)


@pytest.fixture
def original(tmp_path):
    lengths = np.random.default_rng(0).integers(2, S + 1, NUM_RECORDS)
    return Original(write_features(tmp_path / "in.tfrecord", make_features(lengths, S)))


def check_error(error, path):
    assert path in str(error) and "\n" not in str(error)


@many(12, 60)
@pytest.mark.parametrize("damage", DAMAGES + RECORD_DAMAGES, ids=lambda damage: damage.__name__)
def test_reading_damaged_bytes(original, damage, num_trials):
    """Exactly the sequences of the records that are whole, each as often and at its place; else an error.

    Without a manifest nobody can tell a file of fewer whole records from a file that never had more.
    """
    rng, num_whole = seed_of(damage), 0
    for _ in range(num_trials):
        changed = damage(original.frames if damage in RECORD_DAMAGES else original.content, rng)
        original.write(changed)
        expected = original.whole_records(changed)
        num_whole += expected is not None
        if expected is None:
            with pytest.raises(InputError) as error:
                list(read_unpacked(original.path))
            check_error(error.value, original.path)
        else:
            assert digests(read_unpacked(original.path)) == expected
    assert num_whole > num_trials * 0.7 if damage in RECORD_DAMAGES else num_whole < num_trials * 0.3


def write_ids(path):
    """Records of one feature, which --features reads with another reader."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(1, 99, size) for size in rng.integers(1, S, NUM_RECORDS)]
    counts = np.array([len(values) for values in columns])
    tfrecords.write_records(path, serialize_ragged({"ids": (np.concatenate(columns), counts)}))


@many(8, 40)
@pytest.mark.parametrize("features", ["", f"ids:int:{S}"])
@pytest.mark.parametrize("damage", DAMAGES + RECORD_DAMAGES, ids=lambda damage: damage.__name__)
def test_the_whole_command_on_damaged_bytes(tmp_path, original, damage, features, num_trials):
    """Where a manifest says what the file was, any other is an error, and nothing is written."""
    if features:
        write_ids(original.path)
        original = Original(original.path, None)
    original.write_manifest()
    rng, num_errors = seed_of(damage), 0
    settings = {"input_file": original.path, "features": features, "num_workers": 1, "num_shards": 1}
    settings |= {} if features else {"max_seq_length": S}
    for trial in range(num_trials if not features else 2):
        changed = damage(original.frames if damage in RECORD_DAMAGES else original.content, rng)
        original.write(changed)
        out = tmp_path / f"out-{trial}"
        if changed == original.content:
            pack(PackConfig(output_dir=str(out), **settings))
            if not features:
                packed = [
                    digest for path in out.glob("*.tfrecord") for digest in digests(read_packed(str(path)))
                ]
                assert sorted(packed) == sorted(original.digests)
            continue
        with pytest.raises(InputError) as error:
            pack(PackConfig(output_dir=str(out), **settings))
        check_error(error.value, original.path)
        assert not out.exists()
        num_errors += 1
    assert num_errors > num_trials * 0.6 or features


@many(10, 75)
@pytest.mark.parametrize("damage", [flip, swap, duplicate, drop], ids=lambda damage: damage.__name__)
def test_damaged_content_with_right_checksums(original, damage, num_trials):
    """Damage from before the checksums were made: an error, or a sequence that the rules of a record allow.

    All other sequences are as they were. With a manifest it is an error anyway, see above.
    """
    serialized = list(tfrecords.read_records(original.path))
    rng, num_errors = seed_of(damage), 0
    for _ in range(num_trials):
        damaged = list(serialized)
        index = rng.integers(len(damaged))
        damaged[index] = damage(damaged[index], rng)
        tfrecords.write_records(original.path, damaged)
        try:
            found = digests(read_unpacked(original.path))
        except InputError as error:
            check_error(error, original.path)
            num_errors += 1
            continue
        assert len(found) == NUM_RECORDS
        assert [*found[:index], *found[index + 1 :]] == [
            *original.digests[:index],
            *original.digests[index + 1 :],
        ]
    assert num_errors > 0
