"""Input files of a run: checksums and numbers of records, found by one reading of every byte."""

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.parallel.processes import ALONE
from bert_packed.records import inputs, tfrecords


def describe_inputs(paths, scans=None, are_checked=False):
    """Identify packed TFRecord files: list of dicts `path`, `sha256`, `num_records`.

    Args:
        scans: `tfrecords.FileScan` of each file; None to read them here.
        are_checked: True if their records were decoded, so that only the manifests are left to compare.

    Raises `InputError` where a file is damaged (file and record), or is not what its manifest says.
    """
    described = []
    promised = inputs.read_promises(paths)
    for path, scan in zip(paths, scans or map(tfrecords.scan_file, paths), strict=True):
        # Records with the checksum of a manifest need not be decoded to be trusted
        if promised.get(path) != {"sha256": scan.sha256, "num_records": scan.num_records}:
            # names the record if the file is damaged
            num_records = scan.num_records if are_checked else tfrecords.count_records(path)
            inputs.check_promises(promised.get(path, {}), path, num_records, scan.sha256)
        described.append({"path": str(path), "sha256": scan.sha256, "num_records": scan.num_records})
    return described


def scan_inputs(paths, store, processes=ALONE):
    """Read the packed files that are new or have changed: dict from path to `tfrecords.FileScan`, of all.

    All `processes` call this. The first keeps the scans in `store`, a file in a folder that all processes
    see.

    Raises `InputError` where a file is damaged, is not what its manifest says, changes while it is read, or
    differs from the first process's.
    """
    found = {}

    def read_what_is_new():
        found.update(inputs.read_scans(store, paths))
        new = _scan([path for path in paths if path not in found])
        if new:
            found.update(new)
            storage.make_folder(inputs.folder_of(store))
            inputs.write_scans(store, found)

    processes.first_decides(read_what_is_new)
    if not processes.is_first:
        found = inputs.read_scans(store, paths)
        # A copy on this machine's disk has another stamp, and may have other content
        own = _scan([path for path in paths if path not in found])
        checksums = inputs.read_checksums(store) if own else {}
        for path, (scan, _) in own.items():
            if scan.sha256 != checksums.get(path, scan.sha256):
                raise InputError(
                    f"{path} must be the same file for every process. Received: SHA-256 {scan.sha256}, "
                    f"{checksums[path]} where the first process is."
                )
        found |= own
    return {path: scan for path, (scan, _) in found.items()}


def _scan(paths):
    """Scan files and check them, by their manifests or record by record: dict from path to scan and stamp."""
    found = {path: inputs.scan_unchanged(path) for path in paths}
    describe_inputs(paths, [scan for scan, _ in found.values()])
    return found
