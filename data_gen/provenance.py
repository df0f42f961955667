"""Which input record each sequence of a pack comes from: an index beside every shard, to trace a bad batch.

For a shard of two packs, {record 7 of file 0, record 2 of file 1} and {record 9 of file 0}:

    pack_offsets    [0 2 3]     pack i holds the entries offsets[i]:offsets[i + 1], slot after slot
    file_indices    [0 1 0]     into the manifest's `inputs`
    record_numbers  [7 2 9]     from 1
"""

import io

import numpy as np

from data_gen import files
from data_gen.output import read_manifest
from data_gen.sequences import to_offsets
from data_gen.settings import InputError

SUFFIX = ".provenance.npz"


def provenance_path(path):
    """Where the index of a shard is: `a.tfrecord` -> `a.provenance.npz`."""
    return str(path).removesuffix(".tfrecord") + SUFFIX


def write_provenance(path, parts):
    """Write the index of a shard.

    Args:
        path: Where to; it appears when complete.
        parts: List of (sequences per pack, file indices, record numbers), in the order of the packs.
    """
    depths, file_indices, record_numbers = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    write_index(
        path, pack_offsets=to_offsets(depths), file_indices=file_indices, record_numbers=record_numbers
    )


def write_index(path, **arrays):
    """Write arrays of whole numbers, each in the smallest type that holds it; equal ones are equal bytes."""
    small = {
        name: values.astype(np.min_scalar_type(values.max(initial=0))) for name, values in arrays.items()
    }
    content = io.BytesIO()
    np.savez_compressed(content, **small)  # its ZIP entries are all of 1980
    with files.write_whole(path) as partial, files.open_file(partial, "wb") as file:
        file.write(content.getvalue())


def find_sources(path, record_number):
    """The input records of one pack.

    Args:
        path: Shard that was packed with `--provenance`.
        record_number: The pack's record, from 1.

    Returns:
        List of (path of the input file, number of its record), slot after slot.

    Raises:
        InputError: the shard has no index, or no such record.
    """
    index_path = provenance_path(path)
    if not files.exists(index_path):
        raise InputError(f"{path} must be packed with --provenance. Received: no {index_path}.")
    folder = str(path).rpartition("/")[0] or "."
    inputs = (read_manifest(folder) or {}).get("inputs", [])
    with files.open_file(index_path) as file, np.load(io.BytesIO(file.read())) as index:
        offsets = index["pack_offsets"].astype(np.int64)
        if not 1 <= record_number < len(offsets):
            raise InputError(f"{path} must have the record. Received: {record_number} of {len(offsets) - 1}.")
        slots = slice(*offsets[record_number - 1 : record_number + 1])
        file_indices, numbers = index["file_indices"][slots], index["record_numbers"][slots]
    return [(inputs[i]["path"], int(number)) for i, number in zip(file_indices, numbers, strict=True)]
