"""Whether the manifest beside packs tells the truth: its checksums, its counts, and what it says is proven.

All that it says of the packs follows from which strategies they are made of, which one reading counts:

    packs (3 5) (8) (3 5)     ->     num_packs 3, num_sequences 5, efficiency 24 / 24, ...
"""

import collections
import dataclasses
import math
import os

import numpy as np

from bert_packed.core import files
from bert_packed.packing import plan as plans
from bert_packed.packing.bounds import certify, dual_bound
from bert_packed.packing.histogram import is_whole, to_json
from bert_packed.records.inputs import folder_of
from bert_packed.records.manifests import MANIFEST_NAME, read_manifest
from bert_packed.records.provenance import real_name, resolve_path
from bert_packed.records.sequences import id_columns
from bert_packed.schema import FORMS, MLM_NSP, PackSpec


@dataclasses.dataclass
class FileFacts:
    """What a file of packs holds, or the inputs that packs were made of.

    Attributes:
        num_records: Records.
        strategies: Of packs: how often each strategy occurs, a tuple of ascending lengths.
        largest_id: The largest id of a token or label.
        num_overlong: Of inputs: how many sequences were "truncated" and "dropped".
        planned: The strategies to count, a set; None counts all. Other packers have a new one in nearly
            every pack, and memory must not grow with the packs.
        num_others: Packs of other strategies.
    """

    num_records: int = 0
    strategies: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    largest_id: int = 0
    num_overlong: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    planned: frozenset | None = None
    num_others: int = 0

    def add_packs(self, sequences):
        """Add the packs of a batch: `Sequences`, of which those of a pack share their record's number."""
        for strategy, count in count_strategies(sequences["lengths"], sequences["record_numbers"]).items():
            if self.planned is None or strategy in self.planned:
                self.strategies[strategy] += count
            else:
                self.num_others += count
            self.num_records += count
        for name in id_columns(sequences):
            self.largest_id = max(self.largest_id, int(sequences[name].max(initial=0)))


def count_strategies(lengths, packs):
    """Strategies of some packs: lengths [5 3 8], packs [1 1 2] -> {(3, 5): 1, (8,): 1}.

    Args:
        lengths: Int array `[n]`, of each sequence.
        packs: Int array `[n]`, which pack it is in.
    """
    order = np.lexsort((lengths, packs))
    lengths, starts = lengths[order], np.unique(packs[order], return_index=True)[1]
    depths = np.diff(starts, append=len(lengths))
    found = {}
    for depth in np.unique(depths).tolist():
        rows = starts[depths == depth][:, None] + np.arange(depth)
        different, counts = np.unique(lengths[rows], axis=0, return_counts=True)
        found |= zip(map(tuple, different.tolist()), counts.tolist(), strict=True)
    return found


def planned_strategies(folder):
    """The strategies of the plan in a folder's manifest: frozen set of tuples; empty without one of ours."""
    manifest = read_manifest(folder, any_json=True) or {}
    if manifest.get("kind") != "packed":
        return frozenset()
    try:
        return frozenset(tuple(strategy) for strategy, _ in manifest["plan"]["strategies"])
    except (KeyError, TypeError, ValueError):  # which `find_false_claims` tells
        return frozenset()


def find_false_claims(packed, inputs, spec, row_lengths=None):
    """Compare the manifests beside packs with what the files hold.

    What a manifest says of its packs together is checked where all of them were read. A `lower_bound` must be
    proven by the histogram and the dual values of the plan; a weaker one than they prove is true.

    Args:
        packed, inputs: Dicts from path to `FileFacts`: the packs, and what they were made of.
        spec: `PackSpec` of the packs.
        row_lengths: Of packs of split sequences: dict from folder to the lengths of the sequences in it,
            joined, and how many have each. Then `packed` has `split_sequences.RowFacts`.

    Returns:
        List of sentences that name what is false; manifests of other programs claim nothing.
    """
    found, totals = [], []
    for folder, paths in _group_by_folder(packed).items():
        manifest = read_manifest(folder, any_json=True) or {}
        if manifest.get("kind") != "packed":
            totals.append(None)
            continue
        claims = _Claims(os.path.join(folder, MANIFEST_NAME))
        facts = {os.path.basename(path): packed[path] for path in paths}
        totals.append(None)
        try:
            is_whole = _check_files(claims, manifest["files"], folder, facts)
            _check_inputs(claims, manifest["inputs"], folder, inputs)
            if is_whole:
                listed = [facts[entry["name"]] for entry in manifest["files"]]
                if row_lengths is None:
                    _check_packs(claims, manifest, listed, spec)
                else:
                    _check_rows(claims, manifest, listed, spec, row_lengths.get(folder_of(paths[0]), {}))
                totals[-1] = (claims, *_numbers_read(manifest))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            claims.add(f"what packing writes must be there, in its form. Received: {_describe(error)}.")
        found.append(claims)
    if totals and all(totals):
        _check_reading(totals, inputs)
    return [sentence for claims in found for sentence in claims.false]


def _group_by_folder(paths):
    """Dict from folder to the paths in it; two spellings of a folder are one, the first."""
    spellings, groups = {}, {}
    for folder, path in sorted((folder_of(path), path) for path in paths):
        place = folder if files.is_remote(folder) else os.path.realpath(folder)
        groups.setdefault(spellings.setdefault(place, folder), []).append(path)
    return groups


def _numbers_read(manifest):
    """What a manifest says of the inputs: records, and dict of overlong ones; `ValueError` if not numbers."""
    overlong = {name: manifest["num_overlong"].get(name, 0) for name in ("truncated", "dropped")}
    for value in (manifest["num_records"], *overlong.values()):
        if not is_whole(value):
            raise ValueError(f"{_short(value)} for a whole number")
    return manifest["num_records"], overlong


class _Claims:
    """Collects what is false in one manifest."""

    def __init__(self, path):
        self._path = path
        self.false = []

    def add(self, sentence):
        self.false.append(f"{self._path}: {sentence}")

    def check(self, name, claimed, fact):
        """Compare a number or plain JSON with what it must be."""
        is_float = isinstance(claimed, float) and isinstance(fact, int | float)
        if not (math.isclose(claimed, fact, rel_tol=1e-9) if is_float else claimed == fact):
            self.add(f"`{name}` must be {_short(fact)}. Received: {_short(claimed)}.")


def _check_files(claims, listed, folder, facts):
    """Check the entries of files; returns whether all files that are listed were read."""
    for entry in listed:
        name = entry["name"]
        if name in facts:
            claims.check(f"num_records of {name}", entry["num_records"], facts[name].num_records)
            claims.check(f"sha256 of {name}", entry["sha256"], files.file_sha256(os.path.join(folder, name)))
        elif not files.is_file(os.path.join(folder, name)):
            claims.add(f"`files` must be there. Received: {name}, which is missing.")
    return all(entry["name"] in facts for entry in listed)


def _check_inputs(claims, listed, folder, inputs):
    """Check the entries of inputs that stand where they were packed from, or were moved to with the packs."""
    here = {real_name(path): path for path in inputs}
    for entry in listed:
        path = here.get(real_name(resolve_path(entry, folder)))
        if path:
            claims.check(f"num_records of {path}", entry["num_records"], inputs[path].num_records)
            claims.check(f"sha256 of {path}", entry["sha256"], files.file_sha256(path))


def _check_packs(claims, manifest, listed, spec):
    """Check what is said of the packs of all files together."""
    strategies = sum((facts.strategies for facts in listed), collections.Counter())
    plan = plans.from_json(manifest["plan"])
    num_others = sum(facts.num_others for facts in listed)
    if num_others:  # all else that is said follows from the strategies
        claims.add(f"`strategies` of the plan must be those of all packs. Received: {num_others} of others.")
        return
    real = dataclasses.replace(
        plan, max_seq_length=spec.max_seq_length, strategies=dict(strategies), dual_values=()
    )
    claims.check("objective", FORMS[manifest.get("objective", MLM_NSP)], spec.objective)
    claims.check("spec", PackSpec(**manifest["spec"]), spec)
    claims.check("num_packs", manifest["num_packs"], real.num_packs)
    claims.check("num_sequences", manifest["num_sequences"], real.num_sequences)
    claims.check("histogram", manifest["histogram"], to_json(real.histogram()))
    claims.check("strategies of the plan", plan.strategies, real.strategies)
    claims.check("max_seq_length of the plan", plan.max_seq_length, spec.max_seq_length)
    claims.check("efficiency", manifest["efficiency"], real.efficiency)
    claims.check("packing_factor", manifest["packing_factor"], real.packing_factor)
    claims.check("depth", manifest["depth"], real.depth)
    asked = plan.max_sequences_per_pack
    if asked != "max" and asked < real.depth:
        claims.add(f"`max_sequences_per_pack` of the plan must be at least {real.depth}. Received: {asked}.")
    _check_vocabulary(claims, manifest, listed)
    _check_bounds(claims, manifest, plan, real)


def _check_vocabulary(claims, manifest, listed):
    largest = max(facts.largest_id for facts in listed)
    if manifest.get("vocab_size", largest + 1) <= largest:
        claims.add(f"`vocab_size` must be above the id {largest}. Received: {manifest['vocab_size']}.")


def _check_rows(claims, manifest, listed, spec, lengths):
    """Check what is said of packs of split sequences together; how they are laid, reading them has proven."""
    num_packs = sum(facts.num_records for facts in listed)
    num_sequences, num_tokens = sum(lengths.values()), sum(length * lengths[length] for length in lengths)
    found = sorted(lengths)
    claims.check("objective", manifest["objective"], spec.objective)
    claims.check("spec", PackSpec(**manifest["spec"]), spec)
    for name, fact in (
        ("num_packs", num_packs),
        ("num_sequences", num_sequences),
        ("num_parts", sum(facts.num_parts for facts in listed)),
        ("num_tokens", num_tokens),
        ("histogram", {"lengths": found, "counts": [lengths[length] for length in found]}),
        ("efficiency", num_tokens / (num_packs * spec.max_seq_length)),
        ("packing_factor", num_sequences / num_packs),
        ("depth", max(facts.depth for facts in listed)),
    ):
        claims.check(name, manifest[name], fact)
    _check_vocabulary(claims, manifest, listed)


def _check_bounds(claims, manifest, plan, real):
    """Prove the lower bounds again, from the packs' own lengths."""
    bound, said = manifest["lower_bound"], manifest["plan"]["certificate"]
    depth = plan.max_sequences_per_pack
    proven = certify(real.num_packs, real.histogram(), real.max_seq_length, depth, plan.dual_values)
    bounds = dict(proven.bounds)
    if "LP" in said["bounds"] and "LP" not in bounds and plan.dual_values:
        # `certify` prices no values where a bound that costs nothing is reached: the claim may still be true
        bounds["LP"] = dual_bound(real.histogram(), real.max_seq_length, depth, plan.dual_values)
    for name, claimed, most in (
        ("lower_bound", bound, proven.lower_bound),
        *((f"bound {kind}", said["bounds"][kind], bounds.get(kind, 0)) for kind in said["bounds"]),
    ):
        if claimed > most:
            claims.add(f"`{name}` must be at most {most}, which is what is proven. Received: {claimed}.")
    claims.check("lower_bound of the certificate", said["lower_bound"], bound)
    gap = (real.num_packs - bound) / bound if bound else 0.0
    claims.check("gap", manifest["gap"], gap)
    claims.check("gap of the certificate", said["gap"], gap)


def _check_reading(totals, inputs):
    """Check what all manifests together say of the inputs."""
    claims = totals[-1][0]
    num_records = sum(records for _, records, _ in totals)
    claims.check("num_records", num_records, sum(facts.num_records for facts in inputs.values()))
    for name in ("truncated", "dropped"):
        said = sum(overlong[name] for _, _, overlong in totals)
        claims.check(f"num_overlong {name}", said, sum(f.num_overlong[name] for f in inputs.values()))


def _describe(error):
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _short(value):
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
