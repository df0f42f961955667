"""Comparison of packs with the sequences of their inputs, and with their manifests."""

import dataclasses
import functools
import itertools

import numpy as np
from tqdm import tqdm

from bert_packed.assembly.feature_packs import ADDED_SUFFIXES
from bert_packed.assembly.record_kinds import BertKind, CausalKind
from bert_packed.core.settings import InputError
from bert_packed.records.examples import feature_names
from bert_packed.records.inputs import folder_of
from bert_packed.records.provenance import read_manifest
from bert_packed.records.read_causal import find_num_rows, read_joined
from bert_packed.records.record_rules import LayoutError, find_common_objective, read_pack_spec
from bert_packed.records.sequences import content_digests, rank_in_groups
from bert_packed.records.tfrecords import first_record
from bert_packed.schema import CAUSAL_LM
from data_gen.manifest_claims import FileFacts, find_false_claims, planned_strategies
from data_gen.pack_config import OVERLONG_CHOICES

NUM_SHOWN = 5  # differences of each kind


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare_files`."""

    num_input_sequences: int  # those that `overlong` drops are not counted
    num_packed_sequences: int
    num_missing: int  # sequences of the inputs that are not in the packs
    num_unexpected: int  # sequences in the packs that are not in the inputs, or too often
    differences: tuple[str, ...]  # sentences: the first differences, or the violation of the layout
    malformed: bool = False  # the packs violate the layout; counts are of the content read before that
    false_claims: tuple[str, ...] = ()  # sentences about the manifests beside the packs

    @property
    def is_equal(self):
        return not self.differences

    @property
    def is_good(self):
        return self.is_equal and not self.false_claims


def compare_files(input_files, packed_files, overlong):
    """Compare the sequences of unpacked and packed files, and the manifests of the packs with both.

    Sequences are equal where all columns but their origins are. Memory does not grow with their number: files
    that differ are read again, once for each two million sequences in buckets that differ. `overlong` is the
    setting with which the packs were made.
    """
    _refuse_other_features(packed_files)
    objective = find_common_objective([*packed_files, *input_files])
    spec = read_pack_spec(packed_files)
    kind = (CausalKind if objective == CAUSAL_LM else BertKind)(spec.max_seq_length, overlong)

    num_rows = find_num_rows(packed_files) if objective == CAUSAL_LM else 0
    inputs, packed = {}, {}  # `FileFacts` of each path; every pass over the files starts them again

    def read_inputs():
        for path in input_files:
            inputs[path] = facts = FileFacts()
            for batch in kind.read_unpacked(path):
                facts.num_records += len(batch)
                # Packing refuses overlong sequences where it is "error": here they count as missing
                if overlong != "error" and not num_rows:
                    batch, num_overlong = kind.fit(batch)
                    facts.num_overlong.update(num_overlong)
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
    """The `overlong` setting of packs, from the manifests beside them; "error" without one."""
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
    for path in packed_files:
        names = feature_names(first_record(path), path, 1)
        if any(name.endswith(ADDED_SUFFIXES[0]) for name in names):  # no other kind of packs has these
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


NUM_BUCKETS = 2**16
# About as many digests of both sides are in memory: 40 bytes each, four times that while they are sorted
MOST_HELD = 2**21


class BucketSums:
    """Number and sum of the digests in each bucket of one side, in 24 bytes per bucket."""

    def __init__(self):
        self.counts = np.zeros(NUM_BUCKETS, np.int64)
        self._sums = np.zeros((NUM_BUCKETS, 2), np.uint64)

    def add(self, digests):
        buckets = find_buckets(digests)
        self.counts += np.bincount(buckets, minlength=NUM_BUCKETS)
        for half in range(2):
            np.add.at(self._sums[:, half], buckets, digests[:, half])  # modulo 2^64

    def find_different(self, other):
        """Buckets whose content differs from the other side's: ascending int array."""
        differs = (self.counts != other.counts) | np.any(self._sums != other._sums, axis=1)
        return np.flatnonzero(differs)


def find_buckets(digests):
    return (digests[:, 0] % np.uint64(NUM_BUCKETS)).astype(np.int64)


def find_unmatched(sums, readers):
    """Yield, by group of buckets, the origins on either side without a partner: two int arrays `[m, 3]`.

    `readers` read each side again, to an iterable of (digests, origins).
    """
    for group in group_buckets(sums[0].find_different(sums[1]), sums[0].counts + sums[1].counts):
        sides = [hold(read(), group) for read in readers]
        rows = unmatched(*(digests for digests, _ in sides))
        yield tuple(origins[some] for some, (_, origins) in zip(rows, sides, strict=True))


def group_buckets(buckets, counts):
    """Group buckets, less than twice `MOST_HELD` digests of both sides in a group of several.

    counts [3 4 2 9] with MOST_HELD = 7   ->   buckets {0 1}, {2}, {3}
    """
    groups = (np.cumsum(counts[buckets]) - 1) // MOST_HELD
    return np.split(buckets, np.flatnonzero(np.diff(groups)) + 1) if len(buckets) else []


def hold(batches, buckets):
    """Keep the (digests, origins) of some buckets, in order: two arrays, `[m, 2]` and `[m, 3]`."""
    is_wanted = np.zeros(NUM_BUCKETS, bool)
    is_wanted[buckets] = True
    held = [(np.zeros((0, 2), np.uint64), np.zeros((0, 3), np.int64))]
    for digests, origins in batches:
        wanted = is_wanted[find_buckets(digests)]
        held.append((digests[wanted], origins[wanted]))
    return tuple(np.concatenate(arrays) for arrays in zip(*held, strict=True))


def unmatched(left, right):
    """Ascending indices of entries without a partner in the other multiset; both are uint64 `[n, 2]`.

    left [a b a], right [a c]   ->   left [1 2], right [1]
    """
    both = np.concatenate([left, right])
    order = np.lexsort(both.T)
    is_new = np.any(both[order][1:] != both[order][:-1], axis=1)
    groups = np.zeros(len(both), np.int64)
    groups[order[1:]] = np.cumsum(is_new)
    sides = groups[: len(left)], groups[len(left) :]
    counts = [np.bincount(side, minlength=len(both)) for side in sides]
    return tuple(
        np.flatnonzero(rank_in_groups(side) >= others[side])
        for side, others in zip(sides, reversed(counts), strict=True)
    )
