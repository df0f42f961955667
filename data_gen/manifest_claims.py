"""Verification of manifests against their packs: checksums, counts, plan and lower bounds.

All claims about planned packs follow from their strategies, which one pass over the packs counts:

    packs (3 5) (8) (3 5)     ->     num_packs 3, num_sequences 5, efficiency 24 / 24, ...
"""

import dataclasses
import math
import os
from collections import Counter

import numpy as np

from bert_packed.core import storage
from bert_packed.packing import plan as plans
from bert_packed.packing.arguments import is_whole
from bert_packed.packing.bounds import certify, dual_bound
from bert_packed.records.inputs import INHERITED_KEYS, folder_of, read_input_manifests
from bert_packed.records.provenance import MANIFEST_NAME, listed_files, read_manifest, real_name, resolve_path
from bert_packed.records.sequences import id_columns
from bert_packed.schema import FORMS, MLM_NSP, PackSpec


@dataclasses.dataclass
class FileFacts:
    """Facts about the content of a file, packed or input."""

    num_records: int = 0
    num_overlong: Counter = dataclasses.field(default_factory=Counter)  # "truncated" and "dropped" inputs
    num_parts: int = 0  # sequences in packs, each part of one counted
    depth: int = 0  # maximum of sequences in a pack
    largest_id: int = 0  # labels count, too
    lengths: Counter = dataclasses.field(default_factory=Counter)  # whole sequences
    strategies: Counter = dataclasses.field(default_factory=Counter)  # tuples of ascending lengths
    # Only these strategies are counted: in other programs' packs nearly each pack has a new one, and memory
    # must not grow with the packs
    planned: frozenset = frozenset()
    num_others: int = 0  # packs with other strategies

    def add_packs(self, sequences, num_packs):
        """Add a batch of packs: `Sequences`, where those of a pack share its record number."""
        self.num_records += num_packs
        self.num_parts += len(sequences)
        for strategy, count in count_strategies(sequences["lengths"], sequences["record_numbers"]).items():
            self.depth = max(self.depth, len(strategy))
            if strategy in self.planned:
                self.strategies[strategy] += count
            else:
                self.num_others += count
        for name in id_columns(sequences):
            self.largest_id = max(self.largest_id, int(sequences[name].max(initial=0)))

    def add_lengths(self, lengths):
        values, counts = np.unique(lengths, return_counts=True)
        self.lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def count_strategies(lengths, packs):
    """Count strategies of packs: lengths [5 3 8], packs [1 1 2] -> {(3, 5): 1, (8,): 1}."""
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
    """Strategies of the plan in a folder's manifest; empty without a valid one."""
    manifest = read_manifest(folder, any_json=True) or {}
    try:
        return frozenset(tuple(strategy) for strategy, _ in manifest["plan"]["strategies"])
    except (KeyError, TypeError, ValueError):  # `find_false_claims` reports these
        return frozenset()


def find_false_claims(packed, inputs, spec, is_split=False):
    """Compare the manifests beside packs with the files: list of sentences, one per false claim.

    `packed` and `inputs` are dicts from path to `FileFacts`. Claims about all packs of a manifest are checked
    only where all of them were read. Manifests of other programs are ignored.
    """
    found, readings, are_complete = [], [], True
    inherited, _ = read_input_manifests(inputs)
    groups = {}  # paths by their folder, without links
    for path in sorted(packed):
        groups.setdefault(folder_of(real_name(path)), []).append(path)
    for paths in groups.values():
        folder = folder_of(paths[0])
        manifest = read_manifest(folder, any_json=True) or {}
        facts = {os.path.basename(path): packed[path] for path in paths}
        # A manifest of another kind that lists these packs, and has their shape, is no other program's
        lists_them = any(entry["name"] in facts for entry in listed_files(manifest)) and "spec" in manifest
        if manifest.get("kind") != "packed" and not lists_them:
            are_complete = False
            continue
        claims = _Claims(os.path.join(folder, MANIFEST_NAME))
        found.append(claims)
        claims.check("kind", manifest.get("kind"), "packed")
        try:
            is_complete = _check_files(claims, manifest["files"], folder, facts)
            _check_inputs(claims, manifest["inputs"], folder, inputs)
            _check_inherited(claims, manifest, inherited, spec)
            if is_complete:
                listed = [facts[entry["name"]] for entry in manifest["files"]]
                _check_packs(claims, manifest, listed, spec, is_split)
                readings.append(_numbers_read(manifest))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            is_complete = False
            received = f"no {error}" if isinstance(error, KeyError) else error
            claims.add(f"what packing writes must be there, in its form. Received: {received}.")
        are_complete &= is_complete
    if are_complete:
        _check_readings(found[-1], readings, inputs.values())
    return [sentence for claims in found for sentence in claims.false]


class _Claims:
    """The false claims of one manifest."""

    def __init__(self, path):
        self._path = path
        self.false = []

    def add(self, sentence):
        self.false.append(f"{self._path}: {sentence}")

    def check(self, name, claimed, fact):
        """Compare a claim, a number or plain JSON, with the fact."""
        is_float = isinstance(claimed, float) and isinstance(fact, int | float)
        if not (math.isclose(claimed, fact, rel_tol=1e-9) if is_float else claimed == fact):
            self.add(f"`{name}` must be {_short(fact)}. Received: {_short(claimed)}.")


def _check_files(claims, listed, folder, facts):
    """Check the entries of files; returns True if all listed files were read."""
    for entry in listed:
        name = entry["name"]
        path = os.path.join(folder, name)
        if name in facts:
            claims.check(f"num_records of {name}", entry["num_records"], facts[name].num_records)
            claims.check(f"sha256 of {name}", entry["sha256"], storage.file_sha256(path))
        elif not storage.is_file(path):
            claims.add(f"`files` must be there. Received: {name}, which is missing.")
    return all(entry["name"] in facts for entry in listed)


def _check_inputs(claims, listed, folder, inputs):
    """Check the entries of inputs that are still in place, or were moved together with the packs."""
    here = {real_name(path): path for path in inputs}
    for entry in listed:
        path = here.get(real_name(resolve_path(entry, folder)))
        if path:
            claims.check(f"num_records of {path}", entry["num_records"], inputs[path].num_records)
            claims.check(f"sha256 of {path}", entry["sha256"], storage.file_sha256(path))


def _check_inherited(claims, manifest, inherited, spec):
    if not inherited:  # inputs without a manifest
        return
    facts, claimed = {"objective": spec.objective, **inherited}, {"objective": MLM_NSP, **manifest}
    for name in INHERITED_KEYS:
        if name in facts:
            claims.check(name, claimed.get(name), facts[name])
        elif name in claimed:
            rule = "must be in the manifests of the inputs, too"
            claims.add(f"`{name}` {rule}. Received: {_short(claimed[name])} here alone.")


def _check_packs(claims, manifest, listed, spec, is_split):
    num_others = sum(facts.num_others for facts in listed)
    if num_others and not is_split:  # all other claims follow from the strategies
        claims.add(f"`strategies` of the plan must be those of all packs. Received: {num_others} of others.")
        return
    lengths = sum((facts.lengths for facts in listed), Counter())
    num_packs, num_sequences = sum(facts.num_records for facts in listed), lengths.total()
    num_tokens = sum(length * count for length, count in lengths.items())
    depth = max(facts.depth for facts in listed)
    claims.check("objective", FORMS[manifest.get("objective", MLM_NSP)], spec.objective)
    claims.check("spec", PackSpec(**manifest["spec"]), spec)
    facts = {
        "num_packs": num_packs,
        "num_sequences": num_sequences,
        "histogram": {"lengths": sorted(lengths), "counts": [lengths[length] for length in sorted(lengths)]},
        "efficiency": num_tokens / (num_packs * spec.max_seq_length),
        "packing_factor": num_sequences / num_packs,
        "depth": depth,
    }
    if is_split:  # reading the rows has verified their layout
        facts |= {"num_parts": sum(facts.num_parts for facts in listed), "num_tokens": num_tokens}
    for name, fact in facts.items():
        claims.check(name, manifest[name], fact)
    largest = max(facts.largest_id for facts in listed)
    if manifest.get("vocab_size", largest + 1) <= largest:
        claims.add(f"`vocab_size` must be above the id {largest}. Received: {manifest['vocab_size']}.")
    if not is_split:
        strategies = dict(sum((facts.strategies for facts in listed), Counter()))
        _check_plan(claims, manifest, plans.from_json(manifest["plan"]), spec.max_seq_length, strategies)


def _check_plan(claims, manifest, plan, max_seq_length, strategies):
    """Check a plan against the strategies of all packs, and prove its lower bounds again."""
    depth = plan.max_sequences_per_pack
    real = dataclasses.replace(plan, max_seq_length=max_seq_length, strategies=strategies, dual_values=())
    claims.check("strategies of the plan", plan.strategies, strategies)
    claims.check("max_seq_length of the plan", plan.max_seq_length, max_seq_length)
    if depth != "max" and depth < real.depth:
        claims.add(f"`max_sequences_per_pack` of the plan must be at least {real.depth}. Received: {depth}.")
    bound, said = manifest["lower_bound"], manifest["plan"]["certificate"]
    limits = real.histogram(), max_seq_length, depth
    proven = certify(real.num_packs, *limits, plan.dual_values)
    bounds = dict(proven.bounds)
    if "LP" in said["bounds"] and "LP" not in bounds and plan.dual_values:
        # `certify` skips dual values once a cheaper bound is reached, but the claim may still be true
        bounds["LP"] = dual_bound(*limits, plan.dual_values)
    for name, claimed, most in (
        ("lower_bound", bound, proven.lower_bound),
        *((f"bound {kind}", claimed, bounds.get(kind, 0)) for kind, claimed in said["bounds"].items()),
    ):
        if claimed > most:
            claims.add(f"`{name}` must be at most {most}, which is what is proven. Received: {claimed}.")
    claims.check("lower_bound of the certificate", said["lower_bound"], bound)
    gap = (real.num_packs - bound) / bound if bound else 0.0
    claims.check("gap", manifest["gap"], gap)
    claims.check("gap of the certificate", said["gap"], gap)


def _numbers_read(manifest):
    """A manifest's claims about inputs; `ValueError` for other values than integers."""
    overlong = {f"num_overlong {n}": manifest["num_overlong"].get(n, 0) for n in ("truncated", "dropped")}
    numbers = {"num_records": manifest["num_records"], **overlong}
    for value in numbers.values():
        if not is_whole(value):
            raise ValueError(f"{_short(value)} for a whole number")
    return numbers


def _check_readings(claims, readings, inputs):
    """Check the claims of all manifests together about the inputs."""
    facts = {
        "num_records": sum(facts.num_records for facts in inputs),
        **{f"num_overlong {n}": sum(f.num_overlong[n] for f in inputs) for n in ("truncated", "dropped")},
    }
    for name, fact in facts.items():
        claims.check(name, sum(numbers[name] for numbers in readings), fact)


def _short(value):
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
