"""Whatever happens to the bytes of the input, packing ends in one clear error or in the same sequences."""

import numpy as np
import pytest
from unpacked_records import make_features, write_features

from data_gen import records
from data_gen.pack_config import PackConfig
from data_gen.pack_files import pack
from data_gen.read_unpacked import read_unpacked
from data_gen.record_frames import FRAME_BYTES
from data_gen.sequences import concatenate
from data_gen.settings import InputError
from data_gen.verify_files import digest_sequences

S = 16
FRAME = FRAME_BYTES
# over five kinds of damage: 1,000
MANY = pytest.mark.parametrize("num_trials", [15, pytest.param(200, marks=pytest.mark.slow)])


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


def record_ends(path):
    """Where each record ends in its file."""
    return np.cumsum([len(record) + FRAME for record in records.read_records(path)])


def digests(path):
    return sorted(map(tuple, digest_sequences(concatenate(list(read_unpacked(path)))).tolist()))


@pytest.fixture
def original(tmp_path):
    lengths = np.random.default_rng(0).integers(2, S + 1, 12)
    path = write_features(tmp_path / "in.tfrecord", make_features(lengths, S))
    with open(path, "rb") as file:
        return path, file.read(), digests(path)


@MANY
@pytest.mark.parametrize("damage", [flip, truncate, duplicate, swap, drop])
def test_damaged_bytes(original, damage, num_trials):
    """Reading is where damage is found; packing a file that was read is the subject of other tests."""
    path, content, expected = original
    ends = set(record_ends(path).tolist())
    rng = np.random.default_rng([ord(letter) for letter in damage.__name__])
    num_errors = 0
    for _ in range(num_trials):
        changed = damage(content, rng)
        with open(path, "wb") as file:
            file.write(changed)
        try:
            found = digests(path)
        except InputError as error:
            assert path in str(error) and "\n" not in str(error)
            num_errors += 1
            continue
        # whole records less or more are a shorter or longer file, which no reader can tell from a right one
        whole = changed == content or (damage in (truncate, duplicate, drop) and len(changed) in _sums(ends))
        assert whole, "damage was read as data"
        assert changed != content or found == expected
    assert num_errors > num_trials * 0.7


def _sums(ends):
    """Every size that a file of whole records of these can have, none or all of them twice included."""
    sizes = np.diff([0, *sorted(ends)])
    reachable = {0}
    for size in sizes:
        reachable |= {total + size for total in reachable} | {total + 2 * size for total in reachable}
    return reachable


@pytest.mark.parametrize("damage", [flip, truncate, duplicate, swap, drop])
def test_damaged_files_are_not_packed(tmp_path, original, damage):
    """The whole command, where a manifest says how many records there must be: lost ones are noticed."""
    path, content, _ = original
    (tmp_path / "manifest.json").write_text('{"files": [{"name": "in.tfrecord", "num_records": 12}]}')
    rng = np.random.default_rng(1)
    out = tmp_path / "out"
    for _ in range(8):
        changed = damage(content, rng)
        if changed == content:
            continue
        with open(path, "wb") as file:
            file.write(changed)
        with pytest.raises(InputError, match=r"in\.tfrecord"):
            pack(PackConfig(input_file=path, output_dir=str(out), max_seq_length=S, num_workers=1))
        assert not out.exists()


@MANY
@pytest.mark.parametrize("damage", [flip, swap, duplicate, drop])
def test_damaged_content_with_right_checksums(original, damage, num_trials):
    """Damage from before the checksums were made: an error, or sequences that the rules of a record allow."""
    path, _, expected = original
    serialized = list(records.read_records(path))
    rng = np.random.default_rng(2)
    num_errors = 0
    for _ in range(num_trials):
        damaged = list(serialized)
        index = rng.integers(len(damaged))
        damaged[index] = damage(damaged[index], rng)
        records.write_records(path, damaged)
        try:
            found = digests(path)
        except InputError as error:
            assert path in str(error)
            num_errors += 1
            continue
        # what was not hit is as it was
        assert len(found) == len(expected) and len(set(expected) - set(found)) <= 1
    assert num_errors > 0 or num_trials < 200
