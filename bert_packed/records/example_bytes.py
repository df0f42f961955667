"""Encoding of `tf.train.Example` records, a batch at once."""

import functools
import itertools

import numpy as np

from bert_packed import schema

# Numbers below each size are looked up: positions and short vocabularies, then every usual vocabulary. The
# tables are of 32 and 256 KiB, which a core's caches hold.
TABLE_SIZES = {2**14: np.uint16, 2**16: np.uint32}


def serialize_examples(features):
    """Encode features, name -> array `[n, length]`, as n `tf.train.Example` records, `bytes`.

    Equal to TensorFlow's deterministic serialization, byte for byte, and many times as fast: the numbers of
    the whole batch become varints at once, and what repeats from record to record is made once.
    """
    shapes = {name: np.shape(values) for name, values in features.items()}
    if any(len(shape) != 2 for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(f"every feature must have shape [n, length] with one n. Received: {shapes}.")
    return _join_columns([_encode_feature(name, np.asarray(features[name])) for name in sorted(features)])


def serialize_ragged(features):
    """`serialize_examples` of whole numbers: name -> (values of all records, number of each, int `[n]`)."""
    sizes = {
        name: (len(values), int(np.sum(counts)), len(counts)) for name, (values, counts) in features.items()
    }
    if any(held != said for held, said, _ in sizes.values()) or len({n for *_, n in sizes.values()}) != 1:
        raise ValueError(f"every feature must have as many values as it says, for one n. Received: {sizes}.")
    columns = []
    for name in sorted(features):
        values, counts = features[name]
        content, ends = encode_varints(np.asarray(values)[:, np.newaxis])
        columns.append(_cut_entries(name, 3, content, np.concatenate([[0], ends])[np.cumsum(counts)]))
    return _join_columns(columns)


def encode_varints(values):
    """Encode rows as protocol-buffer varints: 7 bits a byte, lowest first, high bit = more follow.

    [[1 300]        ->   bytes  1  172 2  5 7
     [5   7]]            ends   3 5
    """
    if values.size and values.min() < 0:
        raise ValueError(f"whole numbers must not be negative. Received: {values.min()}.")
    num_rows, length = values.shape
    largest = int(values.max()) if values.size else 0
    if largest < 128:
        return values.astype(np.uint8).tobytes(), np.arange(1, num_rows + 1) * length
    size = next((size for size in TABLE_SIZES if largest < size), None)
    if size:
        words, masks = _varint_tables(size)
        flat = np.ascontiguousarray(values).reshape(-1)
        # with clip, NumPy does not compare again what was compared above
        encoded, is_used = (table.take(flat, mode="clip") for table in (words, masks))
        encoded, is_used = encoded.view(np.uint8), is_used.view(bool)
    else:
        encoded, is_used = (array.reshape(-1) for array in _spread(values, largest))
    widths = np.count_nonzero(is_used.reshape(num_rows, -1), axis=1)
    # indexing with a mask takes twice as long as compress where the mask alternates
    return np.compress(is_used, encoded).tobytes(), np.cumsum(widths)


@functools.cache
def _varint_tables(size):
    """The varint of each number below `size` as the bytes of a word, and which of them it uses: `[size]`."""
    tables = []
    for array in _spread(np.arange(size)[:, None], size - 1):
        padded = np.zeros((size, np.dtype(TABLE_SIZES[size]).itemsize), np.uint8)
        padded[:, : array.shape[2]] = array[:, 0]
        tables.append(padded.view(TABLE_SIZES[size])[:, 0])
    return tables


def _spread(values, largest):
    """Varints, all as wide as that of `largest`: uint8 `[n, length, width]`, and which bytes are used."""
    width = -(-largest.bit_length() // 7)
    rest = values.astype(np.uint32 if largest < 2**32 else np.uint64)
    encoded = np.empty((*values.shape, width), np.uint8)
    is_used = np.empty((*values.shape, width), bool)
    is_used[..., 0] = True  # the number 0 takes a byte as well
    for place in range(width):
        encoded[..., place] = rest & 127
        rest = rest >> 7
        more = rest != 0
        encoded[..., place] |= more.astype(np.uint8) << 7
        if place + 1 < width:
            is_used[..., place + 1] = more
    return encoded, is_used


def _join_columns(columns):
    """Records of map entries: list of `bytes`, from pairs of lists, of their headers and of their values."""
    serialized = []
    for parts in zip(*itertools.chain(*columns), strict=True):
        content = b"".join(parts)
        serialized.append(_field_header(1, len(content)) + content)  # Example.features
    return serialized


def _encode_feature(name, values):
    num_rows, length = values.shape
    if values.dtype.kind == "f" or schema.dtype(name) == "float32":
        content = np.ascontiguousarray(values, "<f4").tobytes()
        ends = np.arange(1, num_rows + 1) * (4 * length)
        kind = 2  # Feature.float_list
    else:
        content, ends = encode_varints(values)
        kind = 3  # Feature.int64_list
    return _cut_entries(name, kind, content, ends)


def _cut_entries(name, kind, content, ends):
    """Entries of the Example's feature map: two lists of n `bytes`, headers and values."""
    limits = itertools.pairwise([0, *ends.tolist()])
    values = [content[start:end] for start, end in limits]
    headers = {size: _entry_header(name, kind, size) for size in set(map(len, values))}
    return [headers[len(value)] for value in values], values


@functools.lru_cache(maxsize=2**14)  # few distinct sizes: nearly every row finds its header made
def _entry_header(name, kind, size):
    """The bytes of a feature-map entry before `size` bytes of packed values."""
    values = _field_header(1, size)  # Int64List.value or FloatList.value
    feature = _field_header(kind, len(values) + size) + values
    entry_value = _field_header(2, len(feature) + size) + feature
    key = _field_header(1, len(name.encode())) + name.encode()
    return _field_header(1, len(key) + len(entry_value) + size) + key + entry_value


@functools.lru_cache(maxsize=2**14)
def _field_header(number, size):
    """Tag and length of a length-delimited protocol-buffer field."""
    header = [number << 3 | 2]
    while size >= 128:
        header.append(size & 127 | 128)
        size >>= 7
    return bytes([*header, size])
