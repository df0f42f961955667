"""TFRecord files: written and read as TensorFlow does, in batches; damage is named by file and record."""

import io
import os

import numpy as np
import pytest
from full_disk import largest_file

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records import tfrecords
from bert_packed.records.tfrecords import FRAME_BYTES, masked_checksums, read_batches, scan_file

tf = pytest.importorskip("tensorflow")  # what files are compared with

# Sizes are 0, around the four bytes of a checksum, around a KiB, and of several
SIZES = [0, 1, 2, 3, 4, 5, 100, 1023, 1024, 1025, 1026, 1028, 2048, 5000]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.tfrecord"


def draw_records(sizes):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size, np.uint8).tobytes() for size in sizes]


def write_by_tensorflow(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


def flip(content, place, mask=1):
    return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]


def list_batches(path, *arguments):
    return [batch.to_list() for batch in read_batches(path, *arguments)]


# Writing


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        *([3] * count for count in (1, 511, 512, 513, 1024, 1300)),  # around `WRITE_BATCH`
        [2**20 + number for number in range(6)],  # more than `WRITE_BYTES`
        [2**22 + 5, 3, 2**22, 2**22 - 1, 1],
    ],
    ids=lambda sizes: f"{len(sizes)} of {sizes[0]}",
)
def test_files_are_those_that_tensorflow_writes(tmp_path, path, sizes):
    """Across batches of writing too: none is lost, written twice, or out of order."""
    records = draw_records(sizes)
    entry = tfrecords.write_records(path, iter(records))
    expected = write_by_tensorflow(tmp_path / "expected", records)
    assert path.read_bytes() == expected
    assert entry == tfrecords.FileEntry("x.tfrecord", len(sizes), storage.file_sha256(path))
    assert [record for batch in list_batches(path) for record in batch] == records
    assert tfrecords.count_records(path) == len(sizes)
    scan = scan_file(path)
    assert (scan.sha256, scan.num_records) == (entry.sha256, len(sizes))
    assert scan.offsets.tolist() == [0, *np.cumsum(np.array(sizes) + FRAME_BYTES).tolist()]
    assert tfrecords.first_record(path) == records[0]


def test_full_disk_is_an_operating_system_error(path):
    with pytest.raises(OSError, match=r"x\.tfrecord: .*File too large"), largest_file(50):
        tfrecords.write_records(path, [b"x" * 100])


# Reading


def test_batches_follow_one_another(path, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 3)
    tfrecords.write_records(path, [b"%d" % i for i in range(7)])
    batches = list(read_batches(path))
    assert [batch.to_list() for batch in batches] == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"]]
    assert [(batch.path, batch.number, len(batch)) for batch in batches] == [
        *((str(path), 1, 3), (str(path), 4, 3), (str(path), 7, 1))
    ]
    assert sum(batch.num_bytes for batch in batches) == os.path.getsize(path)


def test_batches_are_bounded_by_bytes(path):
    """One record may have more, so that any can be read. Order and content do not change."""
    records = draw_records([*[10] * 50, 5000, *[10] * 50, *[400] * 30, *[10] * 50])
    tfrecords.write_records(path, records)
    for most in (1, 26, 27, 1000, 5016, 2**20):
        batches = list_batches(path, most)
        assert [record for batch in batches for record in batch] == records
        sizes = [sum(len(record) + FRAME_BYTES for record in batch) for batch in batches]
        assert all(size <= most or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True)), most
        assert len(batches) <= 2 * sum(sizes) / min(most, 5016) + 2 or most < 26
    assert [len(batch) for batch in list_batches(path, 416)].count(1) > 30
    assert [len(batch) for batch in list_batches(path, 832)].count(2) >= 14


def test_parts_of_a_file_are_read_alone(path):
    records = draw_records(SIZES)
    tfrecords.write_records(path, records)
    offsets = scan_file(path).offsets.tolist()
    spans = [(0, 1), (5, 8), (13, 14), (0, 14)]
    places = [(offsets[first], offsets[last] - offsets[first], first + 1) for first, last in spans]
    batches = list(read_batches(path, spans=places))
    assert [batch.to_list() for batch in batches] == [records[first:last] for first, last in spans]
    assert [batch.number for batch in batches] == [1, 6, 14, 1]
    # a file that has become shorter gives what is there
    assert list_batches(path, 2**20, [(offsets[13], 10**9, 14)]) == [records[13:]]
    assert list_batches(path, 2**20, [(offsets[14] + 7, 100, 14)]) == []
    with pytest.raises(InputError, match=r"x\.tfrecord, record 6: the record is truncated"):
        list_batches(path, 2**20, [(0, offsets[1], 1), (offsets[5], offsets[6] - offsets[5] - 1, 6)])


def test_empty_and_missing_files(path):
    with pytest.raises(OSError, match=r"x\.tfrecord"):
        list_batches(path)
    path.write_bytes(b"")
    for read in (list_batches, tfrecords.first_record, tfrecords.count_records):
        with pytest.raises(InputError, match=r"must hold a record\. Received: .*x\.tfrecord, which is empty"):
            read(path)
    assert scan_file(path).offsets.tolist() == [0] and scan_file(path).num_records == 0


# Damage


@pytest.mark.parametrize("content", [b"some text, longer than a header", b"\x1f\x8b" + bytes(50), b"short"])
def test_not_a_tfrecord(path, content):
    path.write_bytes(content)
    for read in (list_batches, tfrecords.first_record):
        with pytest.raises(InputError, match=r"x\.tfrecord is not a TFRecord file, or its record 1"):
            read(path)


@pytest.mark.parametrize("most", [1, 30, 2**20])
def test_every_damaged_byte_and_every_cut_is_found(path, most):
    """Records before the damage are read, with the file read in pieces of any size."""
    records = [b"abc", b"de", b"", b"f" * 9]
    tfrecords.write_records(path, records)
    whole = path.read_bytes()
    ends = np.cumsum([FRAME_BYTES + len(record) for record in records])
    damaged = [(place, flip(whole, place, 16)) for place in range(len(whole))]
    damaged += [(place, whole[:place] + whole[place + 1 :]) for place in range(len(whole))]
    damaged += [(place, whole[:place] + b"\7" + whole[place:]) for place in range(len(whole))]
    damaged += [(size, whole[:size]) for size in range(1, len(whole)) if size not in ends]
    for place, content in damaged:
        path.write_bytes(content)
        number = int(np.searchsorted(ends, place, side="right")) + 1
        message = "is not a TFRecord file" if number == 1 else rf"record {number}: the record is truncated"
        found = []
        with pytest.raises(InputError, match=rf"x\.tfrecord.*{message}"):
            for batch in read_batches(path, most):
                found += batch.to_list()
        assert found == records[: number - 1]


def test_a_scan_of_a_damaged_file_has_its_checksum_alone(path, monkeypatch):
    """Pieces may have any size, as that of a whole file has all."""
    tfrecords.write_records(path, draw_records([30] * 9))
    whole = path.read_bytes()
    for size in (7, 64, 2**20):
        monkeypatch.setattr(tfrecords, "SCAN_BYTES", size)
        path.write_bytes(whole)
        assert scan_file(path).offsets.tolist() == list(range(0, 9 * 46 + 1, 46))
        assert scan_file(path).sha256 == storage.file_sha256(path)
        for content in (whole[:-1], whole + b"\0", flip(whole, 46), whole[:-35], flip(whole, 46 + 7, 255)):
            path.write_bytes(content)
            scan = scan_file(path)
            assert scan.num_records is None and len(scan.offsets) == 0
            assert scan.sha256 == storage.file_sha256(path)


@pytest.mark.parametrize("length", [5000, 2**62])
def test_a_damaged_length_is_not_followed(path, monkeypatch, length):
    """It may name all of a file that no memory holds, or more than any file has."""
    tfrecords.write_records(path, [b"x" * 100] * 50)
    content, num_read = path.read_bytes(), 0

    class Counting(io.BytesIO):
        def read(self, size):
            nonlocal num_read
            num_read += size
            return super().read(size)

    damaged = length.to_bytes(8, "little") + content[8:]
    monkeypatch.setattr(storage, "open_file", lambda path, **_: Counting(damaged))
    with pytest.raises(InputError, match="is not a TFRecord file"):
        list_batches(path, 64)
    assert num_read == 64
    # a length beyond the end of the file is damage, even if its checksum is right
    (checksum,) = masked_checksums(damaged, np.array([0]), np.array([8]))
    damaged = damaged[:8] + int(checksum).to_bytes(4, "little") + damaged[12:]
    with pytest.raises(InputError, match="is not a TFRecord file"):
        list_batches(path, 64)
