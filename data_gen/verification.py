"""Comparison of packs with the sequences of their inputs, and with their manifests."""

import dataclasses
import functools
import itertools

import numpy as np
from tqdm import tqdm

from bert_packed.assembly.bert_packs import BertKind
from bert_packed.assembly.causal_packs import CausalKind
from bert_packed.assembly.feature_spec import ADDED_SUFFIXES
from bert_packed.core.settings import InputError
from bert_packed.records.examples import feature_names
from bert_packed.records.first_records import find_common_objective, read_pack_spec
from bert_packed.records.inputs import folder_of
from bert_packed.records.manifests import read_manifest
from bert_packed.records.record_rules import LayoutError
from bert_packed.records.sequences import content_digests
from bert_packed.records.split_sequences import find_num_rows, read_joined
from bert_packed.records.tfrecords import first_record
from bert_packed.schema import CAUSAL_LM
from data_gen.manifest_claims import FileFacts, find_false_claims, planned_strategies
from data_gen.multiset import BucketSums, find_unmatched
from data_gen.pack_config import OVERLONG_CHOICES

NUM_SHOWN = 5  # differences of each kind


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare_files`."""

    num_input_sequences: int  # without those that `overlong` drops
    num_packed_sequences: int
    num_missing: int  # sequences of the inputs that are not in the packs
    num_unexpected: int  # sequences in the packs that are not in the inputs, or too often
    differences: tuple[str, ...]  # sentences: the first differences, or the violation of the layout
    malformed: bool = False  # the packs violate the layout; counts are of the content read before that
    false_claims: tuple[str, ...] = ()  # sentences about the manifests beside the packs

    @property
    def is_equal(self):
        """True if the packs hold the sequences of the inputs."""
        return not self.differences

    @property
    def is_good(self):
        """True if, in addition, no claim of the manifests is false."""
        return self.is_equal and not self.false_claims


def compare_files(input_files, packed_files, overlong):
    """Compare the sequences of unpacked and packed files, and the manifests of the packs with both.

    Sequences are equal where all columns but their origins are. Memory does not grow with their number
    (`multiset.py`). If the files differ, they are read again, once for each two million sequences in buckets
    that differ.

    `overlong`, "error", "truncate" or "drop", is the setting with which the packs were made. Returns a
    `Comparison`; raises `InputError` where a file cannot be read, or has the wrong kind of records.
    """
    _refuse_other_features(packed_files)
    objective = find_common_objective([*packed_files, *input_files])
    spec = read_pack_spec(packed_files)
    kind = (CausalKind if objective == CAUSAL_LM else BertKind)(spec.max_seq_length, overlong)

    num_rows = find_num_rows(packed_files) if objective == CAUSAL_LM else 0
    inputs, packed = {}, {}  # `FileFacts` of each path; every pass over the files starts them again

    def read_inputs():
        inputs.update((path, FileFacts()) for path in input_files)
        for path in input_files:
            for batch in kind.read_unpacked(path):
                inputs[path].num_records += len(batch)
                # With "error", packing refuses overlong sequences: here they count as missing
                if overlong != "error" and not num_rows:
                    batch, num_overlong = kind.fit(batch)
                    inputs[path].num_overlong.update(num_overlong)
                yield batch

    planned = {folder: planned_strategies(folder) for folder in map(folder_of, packed_files)}

    def read_packs():
        for path in packed_files:
            packed[path] = FileFacts(planned=planned[folder_of(path)])
        if num_rows:
            batches = read_joined(packed_files, num_rows, lambda path, *packs: packed[path].add_packs(*packs))
        else:
            batches = itertools.chain.from_iterable(map(read_whole, packed_files))
        for batch in batches:
            packed[batch.files[0]].add_lengths(batch["lengths"])
            yield batch

    def read_whole(path):
        for batch in kind.read_packed(path):
            packed[path].add_packs(batch, len(np.unique(batch["record_numbers"])))
            yield batch

    readers = [
        functools.partial(_read, read_inputs, input_files, kind.layout),
        functools.partial(_read, read_packs, packed_files, kind.layout),
    ]
    sums = [BucketSums(), BucketSums()]
    try:
        for total, read, title in zip(sums, readers, ("reading inputs", "reading packs"), strict=True):
            for digests, _ in read(title):
                total.add(digests)
    except LayoutError as error:
        return Comparison(int(sums[0].counts.sum()), 0, 0, 0, (str(error),), malformed=True)

    numbers, shown = [0, 0], ([], [])
    for unmatched in find_unmatched(sums, readers):
        for side, origins in enumerate(unmatched):
            numbers[side] += len(origins)
            shown[side].extend(origins[:NUM_SHOWN].tolist())
    words = ("in the inputs, not in the packs", "in the packs, not in the inputs")
    differences = [
        f"{word}: {paths[file]}, record {record} ({length} tokens)"
        for word, origins, paths in zip(words, shown, (input_files, packed_files), strict=True)
        for file, record, length in sorted(origins)[:NUM_SHOWN]
    ]
    false_claims = find_false_claims(packed, inputs, spec, is_split=num_rows > 0)
    counts = (int(total.counts.sum()) for total in sums)
    return Comparison(*counts, *numbers, tuple(differences), false_claims=tuple(false_claims))


def find_overlong(packed_files):
    """The `overlong` setting of packs, from the manifests beside them; "error" without one.

    Raises `InputError` where manifests disagree.
    """
    found = {}
    for directory in sorted({folder_of(path) for path in packed_files}):
        settings = (read_manifest(directory, any_json=True) or {}).get("settings")
        overlong = settings.get("overlong") if isinstance(settings, dict) else None
        # the manifest.json may be another program's
        found[overlong if overlong in OVERLONG_CHOICES else OVERLONG_CHOICES[0]] = directory
    if len(found) > 1:
        raise InputError(f"packs must be made with one --overlong. Received: {found}.")
    return next(iter(found))


def _refuse_other_features(packed_files):
    """Raise `InputError` for packs that were made with `--features`."""
    for path in packed_files:
        names = feature_names(first_record(path), path, 1)
        if any(name.endswith(ADDED_SUFFIXES[0]) for name in names):  # in no other kind of packs
            raise InputError(
                "`packed_file` must be packs of BERT's records: those of --features have no verifier. "
                f"Received: {path}."
            )


def _read(read, paths, layout, title="looking for differences"):
    """Read one side: yields digests, uint64 `[n, 2]`, and their (file, record, length), `[n, 3]`."""
    numbers = {path: number for number, path in enumerate(paths)}
    with tqdm(desc=title, unit=" sequences", disable=None) as progress:
        for batch in read():
            files = np.array([numbers[path] for path in batch.files])[batch["file_indices"]]
            origins = np.stack([files, batch["record_numbers"], batch["lengths"]], axis=1)
            yield content_digests(batch, layout), origins
            progress.update(len(batch))
