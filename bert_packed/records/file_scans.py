"""Scans of whole files, kept with a stamp of each, so that later starts need not read them again.

A stamp is a file's size, the time of its last change, its inode and, of a local file, the time at which
anything of it last changed, which no program sets back. So it sees a file that was written again with as many
bytes, one that was replaced, and one whose time was set back (`touch -r`, `cp -p`, `rsync -t`). It does not
see

- bytes that change below the file system, on a failing disk: the checksum within each record sees them when
  the record is read;
- a second change within one tick of the file system's clock: some milliseconds, on old ones a second or two;
- of a URL: a change to which the store gives the same size and time. A store that gives no time has no
  stamps, and its files are read each time.
"""

import json

import numpy as np

from bert_packed.core import storage
from bert_packed.records.inputs import unchanged
from bert_packed.records.tfrecords import FileScan, scan_file

FORMAT = 1


def scan_unchanged(path):
    """Scan a file: `FileScan`, and the stamp of the file; `InputError` where it changes meanwhile."""
    stamp = stamp_of(path)
    with unchanged([[path, stamp[0], stamp[1]]]):
        return scan_file(path), stamp


def stamp_of(path):
    """Stamp of a file: [bytes, time of the last change, inode, time of any change], in nanoseconds."""
    return [*storage.size_and_time(path), storage.inode(path), storage.change_time(path)]


def write_scans(store, scans):
    """Keep scans of undamaged files, path -> result of `scan_unchanged`, in the place of older ones."""
    scans = {path: (scan, stamp) for path, (scan, stamp) in scans.items() if stamp[1]}
    facts = [[path, stamp, scan.sha256, scan.num_records] for path, (scan, stamp) in scans.items()]
    # Sizes instead of offsets: two bytes a record, most often, instead of eight
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(scan.offsets) for scan, _ in scans.values())])
    header = json.dumps({"format": FORMAT, "files": facts}).encode()
    with storage.write_whole(store) as partial, storage.open_file(partial, "wb") as file:
        np.savez(
            file,
            header=np.frombuffer(header, np.uint8),
            sizes=sizes.astype(np.min_scalar_type(int(sizes.max(initial=0)))),
        )


def read_scans(store, paths):
    """The scans in a store of files that are as they were: dict from some paths to `FileScan` and stamp.

    A store that is missing, damaged, of another version, or that cannot be read, holds none.
    """
    kept = _read(store)
    return {path: kept[path] for path in paths if path in kept and kept[path][1] == stamp_of(path)}


def read_checksums(store):
    """The SHA-256 of every file in a store, whatever has become of the file: dict from path."""
    return {path: scan.sha256 for path, (scan, _) in _read(store).items()}


def _read(store):
    try:
        with storage.open_file(store) as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header["format"] != FORMAT:
                return {}
            sizes = arrays["sizes"]  # read whole: the archive's own checksum is compared then
        kept, first = {}, 0
        for path, stamp, sha256, num_records in header["files"]:
            offsets = np.zeros(num_records + 1, np.int64)
            np.cumsum(sizes[first : first + num_records], out=offsets[1:])
            kept[path] = FileScan(sha256, num_records, offsets), stamp
            first += num_records
        return kept
    except Exception:  # what damage raises has no end: BadZipFile, NotImplementedError, MemoryError, OSError
        return {}
