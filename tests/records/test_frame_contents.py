"""Without TensorFlow, records are read as TensorFlow wrote them, and what it would refuse is refused."""

import numpy as np
import pytest
import tensorflow as tf
from packed_records import PACK
from unpacked_records import write_features

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.records import examples, frame_contents, tfrecords
from bert_packed.records.checksums import masked_checksum
from bert_packed.records.frame_contents import check_frames, read_frames
from bert_packed.records.frames import FRAME_BYTES

# Empty, around the four bytes of a checksum, around a KiB, and of several
SIZES = [0, 1, 2, 3, 4, 5, 100, 1023, 1024, 1025, 1026, 1028, 2048, 5000]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file that TensorFlow wrote, and its records."""
    rng = np.random.default_rng(0)
    records = [rng.integers(0, 256, size, np.uint8).tobytes() for size in SIZES]
    path = str(tmp_path_factory.mktemp("in") / "x.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path, records


def test_records_are_those_that_tensorflow_wrote(written):
    path, records = written
    assert read_frames(path, 0, 100) == records
    offset = sum(SIZES[:5]) + 5 * FRAME_BYTES
    assert read_frames(path, offset, 3) == records[5:8]
    check_frames(path)


def test_checksums_of_the_standard():
    """RFC 3720, B.4: CRC-32C of 32 zeros, ones, and numbers up and down; unmasked as the format says."""
    known = {
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
    }
    for content, checksum in known.items():
        turned = (masked_checksum(content) - 0xA282EAD8) & 0xFFFFFFFF
        assert (turned >> 17 | turned << 15) & 0xFFFFFFFF == checksum


def test_every_flipped_bit_is_found(written, tmp_path, monkeypatch):
    monkeypatch.setattr(frame_contents, "READ_RECORDS", 2)
    path = tmp_path / "x.tfrecord"
    tfrecords.write_records(path, [b"abc", b"de", b"f" * 9])
    whole = path.read_bytes()
    ends = np.cumsum([FRAME_BYTES + 3, FRAME_BYTES + 2, FRAME_BYTES + 9])
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        number = int(np.searchsorted(ends, place, side="right")) + 1
        message = "is not a TFRecord file" if number == 1 else rf"record {number}: the record is truncated"
        with pytest.raises(InputError, match=message):
            check_frames(path)
    for cut in range(1, FRAME_BYTES + 9):
        path.write_bytes(whole[:-cut])
        with pytest.raises(InputError, match="record 3: the record is truncated"):
            check_frames(path)


def test_values_are_those_that_tensorflow_parses(tmp_path):
    pack = {name: np.array([values]) for name, values in PACK.items()}
    path = write_features(tmp_path / "x.tfrecord", pack)
    (record,) = read_frames(path, 0, 2)
    lengths = {name: len(values) for name, values in PACK.items()}
    found = examples.parse_example(record, path, 1, lengths)
    wanted = {name: tf.io.FixedLenFeature([size], schema.dtype(name)) for name, size in lengths.items()}
    for name, values in tf.io.parse_single_example(record, wanted).items():
        assert found[name].dtype == values.numpy().dtype
        np.testing.assert_array_equal(found[name], values.numpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({schema.INPUT_IDS: 9}, r"record 4: input_ids must have length 9.*Received: 8"),
        ({"position": 8}, r"record 4: features position are missing"),
    ],
)
def test_other_lengths_and_missing_features_are_named(tmp_path, change, message):
    pack = {name: np.array([values]) for name, values in PACK.items()}
    path = write_features(tmp_path / "x.tfrecord", pack)
    lengths = {**{name: len(values) for name, values in PACK.items()}, **change}
    with pytest.raises(InputError, match=message):
        examples.parse_example(read_frames(path, 0, 1)[0], path, 4, lengths)
