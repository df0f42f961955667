"""Whether packs hold exactly the sequences of their inputs, and are what their manifests say."""

import collections
import dataclasses
import functools

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
from bert_packed.records.read_packed import LayoutError
from bert_packed.records.sequences import content_digests, rank_in_groups
from bert_packed.records.split_sequences import find_num_rows, read_joined
from bert_packed.records.tfrecords import first_record
from bert_packed.schema import CAUSAL_LM
from data_gen.manifest_claims import FileFacts, find_false_claims, planned_strategies
from data_gen.multiset import BucketSums, group_buckets, hold
from data_gen.pack_config import OVERLONG_CHOICES

NUM_SHOWN = 5  # differences in words, of each kind


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare_files`.

    Attributes:
        num_input_sequences: Sequences of the inputs, those dropped by `overlong` not counted.
        num_packed_sequences: Sequences found in the packs.
        num_missing: Sequences of the inputs that are not in the packs.
        num_unexpected: Sequences in the packs that are not in the inputs, or too often.
        differences: The first of them in words; with `malformed`, what is wrong with the layout.
        malformed: Whether the packs break the layout; then the counts are of what was read before.
        false_claims: What the manifests beside the packs say and is not so.
    """

    num_input_sequences: int
    num_packed_sequences: int
    num_missing: int
    num_unexpected: int
    differences: tuple[str, ...]
    malformed: bool = False
    false_claims: tuple[str, ...] = ()

    @property
    def is_equal(self):
        """Whether the packs hold the sequences of the inputs."""
        return not self.differences

    @property
    def is_good(self):
        """Whether they do, and nothing that is said of them is false."""
        return self.is_equal and not self.false_claims


def compare_files(input_files, packed_files, overlong):
    """Compare the sequences of unpacked and packed files, and what manifests say with what is.

    Two sequences are the same where all columns but their origins are. Memory does not grow with their number
    (`multiset.py`); where they differ the files are read again, once for each two million sequences in
    buckets that do.

    Args:
        input_files, packed_files: Lists of paths.
        overlong: What packing did with inputs longer than the packs: "error", "truncate" or "drop".

    Returns:
        `Comparison`.

    Raises:
        InputError: a file cannot be read as what it should be.
    """
    _refuse_other_features(packed_files)
    objective = find_common_objective([*packed_files, *input_files])
    spec = read_pack_spec(packed_files)
    kind = (CausalKind if objective == CAUSAL_LM else BertKind)(spec.max_seq_length, overlong)

    facts = [{path: FileFacts() for path in paths} for paths in (input_files, packed_files)]

    num_rows = find_num_rows(packed_files) if objective == CAUSAL_LM else 0
    lengths = {}

    def read_inputs():
        for number, path in enumerate(input_files):
            facts[0][path] = its_facts = FileFacts()  # anew, where the file is read again
            for batch in kind.read_unpacked(path):
                its_facts.num_records += len(batch)
                # Under "error" packing would have refused them: here they count as missing.
                if overlong != "error" and not num_rows:
                    batch, num_overlong = kind.fit(batch)
                    its_facts.num_overlong.update(num_overlong)
                yield number, batch

    planned = {folder: planned_strategies(folder) for folder in {folder_of(path) for path in packed_files}}

    def read_packs():
        for number, path in enumerate(packed_files):
            facts[1][path] = its_facts = FileFacts(planned=planned[folder_of(path)])
            for batch in kind.read_packed(path):
                its_facts.add_packs(batch)
                yield number, batch

    def read_rows():
        lengths.clear()
        for number, batch in read_joined(packed_files, num_rows, facts[1]):
            its_lengths = lengths.setdefault(folder_of(packed_files[number]), collections.Counter())
            its_lengths.update(batch["lengths"].tolist())
            yield number, batch

    sides = (
        (input_files, functools.partial(_read, read_inputs, kind.layout)),
        (packed_files, functools.partial(_read, read_rows if num_rows else read_packs, kind.layout)),
    )
    sums = [BucketSums(), BucketSums()]
    try:
        for total, (_, read), title in zip(sums, sides, ("reading inputs", "reading packs"), strict=True):
            for digests, _ in read(title):
                total.add(digests)
    except LayoutError as error:
        return Comparison(int(sums[0].counts.sum()), 0, 0, 0, (str(error),), malformed=True)

    found = ([], []), [0, 0]
    for group in group_buckets(sums[0].find_different(sums[1]), sums[0].counts + sums[1].counts):
        held = [hold(read("looking for differences"), group) for _, read in sides]
        unmatched_rows = unmatched(*(side.digests for side in held))
        for side, (rows, content) in enumerate(zip(unmatched_rows, held, strict=True)):
            found[1][side] += len(rows)
            found[0][side].extend(content.origins[rows[:NUM_SHOWN]].tolist())
    words = ("in the inputs, not in the packs", "in the packs, not in the inputs")
    differences = [
        f"{word}: {paths[file]}, record {record} ({length} tokens)"
        for word, origins, (paths, _) in zip(words, found[0], sides, strict=True)
        for file, record, length in sorted(origins)[:NUM_SHOWN]
    ]
    false_claims = find_false_claims(facts[1], facts[0], spec, lengths if num_rows else None)
    counts = (int(total.counts.sum()) for total in sums)
    return Comparison(*counts, *found[1], tuple(differences), false_claims=tuple(false_claims))


def find_overlong(packed_files):
    """What packing did with overlong sequences, from the manifests beside the packs; "error" without one.

    Raises:
        InputError: directories disagree.
    """
    found = {}
    for directory in sorted({folder_of(path) for path in packed_files}):
        settings = (read_manifest(directory, any_json=True) or {}).get("settings")
        overlong = settings.get("overlong") if isinstance(settings, dict) else None
        # another program's manifest.json says nothing of it
        found[overlong if overlong in OVERLONG_CHOICES else OVERLONG_CHOICES[0]] = directory
    if len(found) > 1:
        raise InputError(f"packs must be made with one --overlong. Received: {found}.")
    return next(iter(found))


def unmatched(left, right):
    """Which entries of two multisets have no partner in the other.

        left [a b a], right [a c]   ->   left [1 2], right [1]

    Args:
        left, right: uint64 `[n, 2]` and `[m, 2]`, digests.

    Returns:
        Two int64 arrays: ascending indices into `left` and into `right`.
    """
    both = np.concatenate([left, right])
    order = np.lexsort((both[:, 1], both[:, 0]))
    is_new = np.ones(len(both), bool)
    is_new[1:] = np.any(both[order][1:] != both[order][:-1], axis=1)
    groups = np.empty(len(both), np.int64)
    groups[order] = np.cumsum(is_new) - 1
    left_groups, right_groups = groups[: len(left)], groups[len(left) :]
    left_counts = np.bincount(left_groups, minlength=is_new.sum())
    right_counts = np.bincount(right_groups, minlength=is_new.sum())
    return (
        np.flatnonzero(rank_in_groups(left_groups) >= right_counts[left_groups]),
        np.flatnonzero(rank_in_groups(right_groups) >= left_counts[right_groups]),
    )


def _refuse_other_features(packed_files):
    """Raise `InputError` for packs that were made with `--features`."""
    for path in packed_files:
        names = feature_names(first_record(path), path, 1)
        if any(name.endswith(ADDED_SUFFIXES[0]) for name in names):  # which no layout of BERT's has
            raise InputError(
                "`packed_file` must be packs of BERT's records: those of --features have no verifier. "
                f"Received: {path}."
            )


def _read(read, layout, title):
    """Read one side: yields digests uint64 `[n, 2]`, and origins int64 `[n, 3]` as in `multiset.Held`."""
    with tqdm(desc=title, unit=" sequences", disable=None) as progress:
        for number, batch in read():
            origins = (np.full(len(batch), number), batch["record_numbers"], batch["lengths"])
            yield content_digests(batch, layout), np.stack(origins, axis=1)
            progress.update(len(batch))
