"""Packed files of a run: facts from their manifests, and what one reading of every byte finds."""

import dataclasses
import functools
import os

import numpy as np

from bert_packed.assembly.assignment import PackOrder
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.data.read_order import index_files
from bert_packed.parallel.processes import ALONE
from bert_packed.records import inputs, tfrecords
from bert_packed.records.inputs import folder_of
from bert_packed.records.provenance import dicts_in, read_manifest, resolve_path
from bert_packed.records.read_causal import find_num_rows
from bert_packed.schema import PackSpec


@dataclasses.dataclass(frozen=True)
class PackedFiles:
    """The records that one flag names."""

    files: list[str]  # none where the flag is empty
    spec: PackSpec | None  # their fixed shapes; None without files
    manifests: list[dict]  # beside them, of those folders that have one of packed records
    has_all_manifests: bool  # whether every folder has one
    found: list[tfrecords.FileScan] | None = None  # of each file; None where they are not read

    @functools.cached_property
    def index(self):
        """Positions of the packs: `PackIndex`; its first use reads the files that are not read yet."""
        return index_files(self.files, self.found)

    @property
    def packing_factor(self):
        """Mean sequences per pack, or None where a folder has no manifest."""
        if not self.files or not self.has_all_manifests:
            return None
        # The manifests have both numbers: counting the sequences would decode every record
        num_packs = sum(manifest["num_packs"] for manifest in self.manifests)
        return sum(manifest["num_sequences"] for manifest in self.manifests) / num_packs

    @functools.cached_property
    def plans(self):
        """`PackOrder` by folder; of each file its folder, and the number there of its first pack or None."""
        orders, firsts = {}, {}
        folders = [folder_of(path) for path in self.files]
        for folder in {*folders}:
            manifest = packed_manifest(folder) or {}
            if "plan" in manifest:
                strategies = {tuple(lengths): count for lengths, count in manifest["plan"]["strategies"]}
                orders[folder] = PackOrder(strategies, manifest["settings"]["random_seed"])
                before = 0
                for entry in manifest["files"]:
                    firsts[folder, entry["name"]] = before
                    before += entry["num_records"]
        names = zip(folders, map(os.path.basename, self.files), strict=True)
        return orders, np.array(folders), [firsts.get(name) for name in names]

    def count_pairs(self, packs):
        """Pairs of tokens that attention computes in packs of `index`, int64 `[n]`, by manifests' plans."""
        files = np.searchsorted(self.index.starts, packs, side="right") - 1
        orders, folders, firsts = self.plans
        numbers, pairs = packs - self.index.starts[files] + np.array(firsts)[files], np.zeros_like(packs)
        for folder, order in orders.items():
            own = folders[files] == folder
            pairs[own] = order.count_pairs(numbers[own], self.spec.max_seq_length)
        return pairs

    @functools.cached_property
    def num_rows(self):
        """R, rows in which packs follow one another (`--split_sequences`); 0 where each is alone."""
        return find_num_rows(self.files) if self.files else 0

    @functools.cached_property
    def input_folders(self):
        """Folders of what the packs were made of, by the manifests beside them: list, each once."""
        folders = {}  # a dict keeps their order
        for folder in dict.fromkeys(folder_of(path) for path in self.files):
            manifest = read_manifest(folder, any_json=True) or {}
            for entry in dicts_in(manifest.get("inputs")):
                if isinstance(entry.get("path"), str):
                    folders[folder_of(resolve_path(entry, folder))] = None
        return list(folders)

    @property
    def vocabularies(self):
        """Checksums of the vocabularies in the manifests: sorted list."""
        return sorted({m["vocab_sha256"] for m in self.manifests if m.get("vocab_sha256")})

    @property
    def do_lower_case(self):
        """True or False as the manifests say of WordPieces, or None where none does."""
        # All records are of one vocabulary, so the first manifest that has the rule speaks for all
        return next((m["do_lower_case"] for m in self.manifests if "do_lower_case" in m), None)

    @property
    def vocab_size(self):
        """Size of the vocabulary, or None where no manifest has it."""
        return max((manifest.get("vocab_size") or 0 for manifest in self.manifests), default=0) or None

    @property
    def longest(self):
        """Longest sequence in the manifests, or 0."""
        lengths = (max(manifest["histogram"]["lengths"], default=0) for manifest in self.manifests)
        return max(lengths, default=0)


NO_PACKS = PackedFiles([], None, [], False)


def packed_manifest(folder):
    """The manifest of a folder if it is one of packed records, else None."""
    manifest = read_manifest(folder)
    return manifest if manifest and manifest.get("kind") == "packed" else None


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
            # This names the record if the file is damaged
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
            storage.make_folder(folder_of(store))
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
