"""Decoding of `tf.train.Example` records, a batch at once.

The bytes of a record, where n is a varint of what follows, to the end of the value or of the record:

    0A n  { 0A n  { 0A n  name   12 n  { 1A n  { 0A n  varints } } } ... }       whole numbers
                                         12 n  { 0A n  floats  }                 numbers with a fraction

Only this is read, with features in one order in all records of the batch, as programs write them. The format
allows more, which `examples.py` parses record by record, several times as slowly.
"""

import itertools

import numpy as np

EXAMPLE_FEATURES, FEATURES_FEATURE, ENTRY_KEY, ENTRY_VALUE, LIST_VALUE = 0x0A, 0x0A, 0x0A, 0x12, 0x0A
KINDS = {"int64": 0x1A, "float32": 0x12}
MORE = 0x80  # of a varint's byte: another follows
MAX_SIZE_BYTES = 4  # of a varint that says a size: records of 256 MiB and more are left to protobuf
MAX_VARINT_BYTES = 10
MAX_NARROW_BYTES = 4  # of varints whose numbers fit into 32 bits
BYTES_AT_ONCE = 2**16  # decoded together, in a core's cache


class OtherFormError(Exception):
    """A record has another form than the one that is read here."""


def decode_columns(records, dtypes):
    """Decode features that all records of a batch have.

    Args:
        records: `Records`, at least one.
        dtypes: Dict from feature name to "int64" or "float32"; other features are passed over.

    Returns:
        Dict from name to (values of all records: float32, or the first of uint8, uint32 and int64 that holds
        them; number of values of each, int64 `[n]`). None where a record has another form, lacks a feature,
        or has it in another type.
    """
    try:
        found = _find_values(records, dtypes)
        return {name: _decode(records.content, *found[name], dtype) for name, dtype in dtypes.items()}
    except OtherFormError:
        return None


def decode_varints(content, ends):
    """Decode the varints of several rows.

        bytes  1  172 2  5 7,  ends  [3 5]   ->   values  [1 300 5 7],  counts  [2 2]

    `content` is uint8 `[m]`, `ends` int `[n]`. Returns values, uint8, uint32 or int64, and how many each row
    has, int64 `[n]`.
    """
    is_last = content < MORE
    row_ends = ends[ends > 0]
    if not is_last[row_ends - 1].all():
        raise OtherFormError
    if is_last.all():
        return content, np.diff(ends, prepend=0)
    values = _join_bytes(content, np.uint32, MAX_NARROW_BYTES)
    if values is None:
        values = _join_bytes(content, np.uint64, MAX_VARINT_BYTES)
        if values is None:
            raise OtherFormError
        values = values.view(np.int64)
    limits = itertools.pairwise([0, *ends.tolist()])
    return values, np.array([np.count_nonzero(is_last[start:end]) for start, end in limits])


def _join_bytes(content, dtype, most):
    """The numbers of varints that follow one another, uint8 `[m]`; None where one has over `most` bytes."""
    # as if one began at every byte, since that is the same for all and gathers nothing; then the others go
    lower, goes_on = content & 0x7F, content >= MORE
    begins = np.concatenate([[True], ~goes_on[:-1]])
    found = []
    for start in range(0, len(content), BYTES_AT_ONCE):
        end = start + BYTES_AT_ONCE
        values, follows = lower[start:end].astype(dtype), goes_on[start:end] & begins[start:end]
        for number in range(1, most + 1):
            if not follows.any():
                break
            if number == most:
                return None
            part = lower[start + number : end + number].astype(dtype)
            part <<= dtype(7 * number)
            part *= follows[: len(part)]
            values[: len(part)] |= part
            more = goes_on[start + number : end + number]
            follows = follows[: len(more)] & more
        # compress, because indexing with a mask takes twice as long where it alternates
        found.append(np.compress(begins[start:end], values))
    return np.concatenate(found)


def _find_values(records, dtypes):
    """Where the packed values of features are: dict from name to starts and ends, int64 `[n]`."""
    names = {name.encode(): name for name in dtypes}
    reader = _Reader(records)
    reader.expect(EXAMPLE_FEATURES)
    reader.expect_size(records.ends)
    found = {}
    while reader.place[0] < records.ends[0]:
        reader.expect(FEATURES_FEATURE)
        ends = reader.read_size() + reader.place
        name = reader.read_name()
        reader.expect(ENTRY_VALUE)
        reader.expect_size(ends)
        if name in names:
            if names[name] in found:
                raise OtherFormError
            reader.expect(KINDS[dtypes[names[name]]])
            reader.expect_size(ends)
            if (reader.place < ends).any():  # else none has a value
                reader.expect(LIST_VALUE)
                reader.expect_size(ends)
            found[names[name]] = reader.place, ends
        reader.go_to(ends)
    if (reader.place != records.ends).any() or found.keys() != dtypes.keys():
        raise OtherFormError
    return found


def _decode(content, starts, ends, dtype):
    limits = zip(starts.tolist(), ends.tolist(), strict=True)
    values = np.frombuffer(b"".join([content[start:end] for start, end in limits]), np.uint8)
    sizes = ends - starts
    if dtype == "float32":
        if (sizes % 4).any():
            raise OtherFormError
        return values.view("<f4"), sizes // 4
    return decode_varints(values, np.cumsum(sizes))


class _Reader:
    """Reads the same field of all records at once, at `place`, int64 `[n]`; raises where they differ."""

    def __init__(self, records):
        self._content = records.content
        self._bytes = np.frombuffer(records.content or b"\0", np.uint8)  # of empty records: one to look at
        self._ends = records.ends
        self.place = records.starts

    def go_to(self, place):
        """Go on at `place`, which no record may end before."""
        if (place > self._ends).any() or (place < self.place).any():
            raise OtherFormError
        self.place = place

    def expect(self, tag):
        """Pass over a tag of one byte."""
        if (self._peek() != tag).any():
            raise OtherFormError
        self.go_to(self.place + 1)

    def expect_size(self, ends):
        """Pass over a size that must lead to `ends`."""
        if (self.read_size() + self.place != ends).any():
            raise OtherFormError

    def read_size(self):
        """A varint: int64 `[n]`."""
        sizes, goes_on = np.zeros(len(self.place), np.int64), np.ones(len(self.place), bool)
        for number in range(MAX_SIZE_BYTES):
            byte = np.where(goes_on, self._peek(), 0)
            self.go_to(self.place + goes_on)
            sizes |= (byte & (MORE - 1)).astype(np.int64) << 7 * number
            goes_on = byte >= MORE
            if not goes_on.any():
                return sizes
        raise OtherFormError

    def read_name(self):
        """The key of an entry, which must be the same in all: `bytes`."""
        self.expect(ENTRY_KEY)
        sizes = self.read_size()
        size, start = int(sizes[0]), int(self.place[0])
        self.go_to(self.place + sizes)
        key = self._content[start : start + size]
        if (sizes != size).any():
            raise OtherFormError
        if (self._bytes[self.place[:, None] + np.arange(-size, 0)] != np.frombuffer(key, np.uint8)).any():
            raise OtherFormError
        return key

    def _peek(self):
        return self._bytes[np.minimum(self.place, len(self._bytes) - 1)]
