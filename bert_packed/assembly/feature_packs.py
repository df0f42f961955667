"""Records of any features, as `--features=SPEC` describes them, and their packs.

    inputs:int:512,targets:int:114                              T5 pairs: a sequence has two lengths
    audio:float*80:3000,text:int:400                            frames of 80 values, and their transcript
    atoms:int:128,places:float*3:=atoms,energy:float:each       molecules: three values per atom, one label

NAME:TYPE:CAPACITY. TYPE is int or float, with *N for N values per position. CAPACITY is the number of
positions in a pack, =NAME for a feature that is always as long as another, or `each` for one position per
sequence.

Two sequences of `inputs:int:8,label:int:each` in a pack with K=3:

    inputs               [7 4 3 9 3 0 0 0]
    inputs_sequence_ids  [1 1 1 2 2 0 0 0]     the position's sequence; 0 = padding
    inputs_position_ids  [0 1 2 0 1 0 0 0]     restarts in every sequence
    label                [5 6 0]               one per slot
"""

import dataclasses
import math
import re
from collections import Counter

import numpy as np

from bert_packed.assembly.assignment import find_places
from bert_packed.assembly.record_kinds import plan_lengths
from bert_packed.core import progress
from bert_packed.core.settings import InputError
from bert_packed.packing import histogram as histograms
from bert_packed.packing.histogram import MAX_LENGTH
from bert_packed.records import examples, tfrecords
from bert_packed.records.record_rules import make_check
from bert_packed.records.sequences import ORIGINS, Column, make_sequences, range_indices, take

MAX_CLASSES = 2**14  # combinations of lengths in a plan; lengths are rounded up to have fewer
MAX_CAPACITIES = 14  # so that each length has at least two steps

EACH = "each"
# Features added to packs for each feature with a capacity
ADDED_SUFFIXES = SEQUENCE_IDS, POSITION_IDS = "_sequence_ids", "_position_ids"
RESERVED_NAMES = {"slots", "file_indices", "record_numbers"}  # columns beside those of the features
_ENTRY = re.compile(
    r"(?P<name>[^:,=]+):(?P<type>int|float)(\*(?P<width>[1-9]\d*))?:(?P<size>each|[1-9]\d*|=.+)"
)


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """One feature of a sequence."""

    name: str
    is_float: bool  # float32, otherwise int64
    width: int  # values per position
    leader: str  # the feature whose length it has, which may be itself; "" for one position per sequence
    capacity: int  # positions in a pack; 0 for one per sequence

    @property
    def sizes(self):
        """Name of the column that counts its positions; "" for one per sequence."""
        # The name is unambiguous, as no name in a SPEC has a colon
        return f"{self.leader}:length" if self.leader else ""

    @property
    def is_leader(self):
        return self.leader == self.name


def parse_features(text):
    """Parse a SPEC: tuple of `FeatureSpec`; raises `ValueError` with the rule."""
    specs = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if not match:
            raise ValueError(f"NAME:int|float[*N]:CAPACITY|=NAME|each, comma-separated, and not {entry!r}")
        name, size = match["name"], match["size"]
        if name in specs:
            raise ValueError(f"features of different names, and not {name!r} twice")
        leader = "" if size == EACH else size.removeprefix("=") if size.startswith("=") else name
        if leader and leader != name and (leader not in specs or specs[leader].leader != leader):
            raise ValueError(f"such that ={leader} names a feature before it that has a capacity")
        capacity = 0 if not leader else int(size) if leader == name else specs[leader].capacity
        if capacity > MAX_LENGTH:
            raise ValueError(
                f"features with a capacity of at most {MAX_LENGTH}, and not {capacity} of {name!r}"
            )
        specs[name] = FeatureSpec(name, match["type"] == "float", int(match["width"] or 1), leader, capacity)
    added = {f"{spec.leader}{suffix}" for spec in specs.values() if spec.leader for suffix in ADDED_SUFFIXES}
    if taken := sorted(specs.keys() & (added | RESERVED_NAMES)):
        raise ValueError(f"features of names that packing does not use itself, and not {taken[0]!r}")
    if not any(spec.leader for spec in specs.values()):
        raise ValueError("such that one feature has a capacity")
    num_capacities = sum(spec.is_leader for spec in specs.values())
    if num_capacities > MAX_CAPACITIES:
        raise ValueError(
            f"such that at most {MAX_CAPACITIES} have a capacity of their own, not {num_capacities}"
        )
    return tuple(specs.values())


@dataclasses.dataclass(frozen=True)
class FeatureShapes:
    """Sizes of packed records."""

    max_sequences_per_pack: int  # K, length of features with one position per sequence
    capacities: dict[str, int]  # of each feature with a capacity


@dataclasses.dataclass(frozen=True)
class FeatureKind:
    """Records of any features, with the interface of `RecordKind`.

    A sequence has a length for each feature with a capacity; with several, plans are for classes of lengths.
    """

    features: tuple[FeatureSpec, ...]
    overlong: str  # "error" or "drop"

    @property
    def leaders(self):
        """The features with a capacity."""
        return [spec for spec in self.features if spec.is_leader]

    @property
    def layout(self):
        layout = ORIGINS | {spec.sizes: Column("<i8") for spec in self.leaders}
        for spec in self.features:
            layout[spec.name] = Column("<f4" if spec.is_float else "<i8", spec.sizes, spec.width)
        return layout

    @property
    def capacities(self):
        return {spec.sizes: spec.capacity for spec in self.leaders}

    @property
    def measured_columns(self):
        return tuple(self.capacities)

    @property
    def num_lengths(self):
        """Number of classes of lengths."""
        return math.prod(self._steps)

    def read(self, path):
        names = examples.feature_names(tfrecords.first_record(path), path, 1)
        examples.check_names(names, [spec.name for spec in self.features], path, 1)
        kinds = {spec.name: "float32" if spec.is_float else "int64" for spec in self.features}
        for batch in tfrecords.read_batches(path):
            columns = self._check(examples.parse_ragged(batch, kinds), batch)
            sequences = make_sequences(self.layout, path, **columns)
            is_overlong = np.zeros(len(batch), bool)
            for spec in self.leaders:
                lengths = sequences[spec.sizes]
                is_overlong |= lengths > spec.capacity
                if self.overlong == "error":
                    rule = f"have at most {spec.capacity} positions, unless --overlong=drop"
                    make_check(batch)(~is_overlong, lengths, f"{spec.name} must {rule}")
            if is_overlong.any():
                sequences = take(sequences, ~is_overlong)
            yield sequences, {"dropped": int(is_overlong.sum())}, len(batch)
            progress.advance(batch.num_bytes)

    def lengths(self, sequences):
        """Class of each sequence, int64 `[n]`; its length, if it has only one."""
        classes = 0
        for spec, grain, steps in zip(self.leaders, self._grains, self._steps, strict=True):
            classes = classes * steps + -(-sequences[spec.sizes] // grain)
        return classes

    def describe_lengths(self, histogram):
        """Plain JSON for the manifest: the histogram, or with several lengths the classes that occur.

            grains [5 1], capacities [512 114]     class 168 = 1 * 115 + 53: a length of 1..5, and one of 53
                                                   classes [168], lengths [[5, 53]]

        `lengths` are rounded up to multiples of `grains`, at most the capacity; `classes` are the numbers in
        the plan's strategies.
        """
        if len(self.leaders) == 1:
            return histograms.to_json(histogram[1:])
        classes = np.flatnonzero(histogram)
        return {
            "features": [spec.name for spec in self.leaders],
            "grains": list(self._grains),
            "classes": classes.tolist(),
            "lengths": self._rounded_lengths(classes).tolist(),
            "counts": np.asarray(histogram)[classes].tolist(),
        }

    def measure(self, sequences, packs):
        return 0

    def make_spec(self, depth, measured):
        return FeatureShapes(depth, {spec.name: spec.capacity for spec in self.leaders})

    def make_plan(self, histogram, algorithm, depth):
        """Plan the packs: dict of plain JSON, as from `plan_lengths`.

        With several lengths the algorithm is always `pack_vectors`, and the efficiency is the mean over
        features, of lengths rounded up as in `describe_lengths`.
        """
        if len(self.leaders) == 1:
            return plan_lengths(histogram[1:], algorithm, self.leaders[0].capacity, depth)
        classes = np.flatnonzero(histogram)
        counts = np.asarray(histogram)[classes]
        grains, capacities = np.array(self._grains), np.array([spec.capacity for spec in self.leaders])
        sizes = self._rounded_lengths(classes)
        least = np.where(sizes > 0, (-(-sizes // grains) - 1) * grains + 1, 0)
        most = int(counts.sum()) if depth == "max" else depth
        strategies = pack_vectors(sizes, counts, capacities, most)
        num_packs, bound = sum(strategies.values()), lower_bound(least, counts, capacities, most)
        return {
            "plan": {
                "algorithm": NAME,
                "capacities": {spec.name: spec.capacity for spec in self.leaders},
                "max_sequences_per_pack": depth,
                "strategies": [[classes[list(key)].tolist(), count] for key, count in strategies.items()],
            },
            "num_sequences": int(counts.sum()),
            "num_packs": num_packs,
            "efficiency": float(np.mean(counts @ sizes / (num_packs * capacities))),
            "packing_factor": int(counts.sum()) / num_packs,
            "depth": max(map(len, strategies)),
            "lower_bound": bound,
            "gap": (num_packs - bound) / bound,
        }

    def assemble(self, sequences, packs, spec):
        arrays = {}

        def put(name, places, values, size):
            placed = np.zeros((len(packs) * size, *values.shape[1:]), values.dtype)
            placed[places] = values
            arrays[name] = placed.reshape(len(packs), -1)

        for feature in self.features:
            name, values = feature.name, sequences[feature.name].reshape(-1, feature.width)
            if not feature.leader:
                size = spec.max_sequences_per_pack
                put(name, packs.owners * size + packs.slots, values[packs.members], size)
                continue
            source, target, _ = find_places(sequences, packs, name, feature.capacity)
            put(name, target, values[source], feature.capacity)
            if feature.is_leader:
                lengths = sequences[feature.sizes][packs.members]
                put(name + SEQUENCE_IDS, target, np.repeat(packs.slots + 1, lengths), feature.capacity)
                put(name + POSITION_IDS, target, range_indices(0, lengths), feature.capacity)
        return arrays

    @property
    def _grains(self):
        """Granularity of each length, such that there are at most `MAX_CLASSES` classes."""
        if len(self.leaders) == 1:
            return (1,)
        most = round(MAX_CLASSES ** (1 / len(self.leaders)))
        # `most` is rounded first: the float root for 14 features may be 1.9999 instead of 2
        most -= most ** len(self.leaders) > MAX_CLASSES
        return tuple(-(-spec.capacity // (most - 1)) for spec in self.leaders)

    @property
    def _steps(self):
        pairs = zip(self.leaders, self._grains, strict=True)
        return tuple(-(-spec.capacity // grain) + 1 for spec, grain in pairs)

    def _rounded_lengths(self, classes):
        """Largest lengths of each class: int `[n, number of leaders]`."""
        steps = np.stack(np.unravel_index(classes, self._steps), axis=1)
        # a length rounded up may exceed its capacity
        return np.minimum(steps * np.array(self._grains), [spec.capacity for spec in self.leaders])

    def _check(self, values, batch):
        """Check the result of `examples.parse_ragged`: columns of a batch of records."""
        columns = {"record_numbers": batch.numbers}
        for spec in self.features:
            flat, num_values = values[spec.name]
            columns[spec.name] = flat
            if not spec.leader:
                wrong, rule = num_values != spec.width, f"have {spec.width} values"
            elif not spec.is_leader:
                wrong, rule = num_values != columns[spec.sizes] * spec.width, f"be as long as {spec.leader}"
            else:
                wrong, rule = num_values % spec.width != 0, f"have {spec.width} values at each position"
                if spec is self.leaders[0]:
                    wrong, rule = wrong | (num_values == 0), rule + ", and one position or more"
                columns[spec.sizes] = num_values // spec.width
            if wrong.any():
                row = int(np.argmax(wrong))
                raise InputError(
                    f"{batch.path}, record {batch.number + row}: {spec.name} must {rule}. "
                    f"Received: {num_values[row]} values."
                )
            if not spec.is_float and flat.size and flat.min() < 0:
                row = int(np.searchsorted(np.cumsum(num_values), int(np.argmin(flat)), side="right"))
                raise InputError(
                    f"{batch.path}, record {batch.number + row}: {spec.name} must not be negative. "
                    f"Received: {flat.min()}."
                )
        return columns


NAME = "vector-greedy"


def pack_vectors(sizes, counts, capacities, depth):
    """Pack classes: dict from strategy, an ascending tuple of class numbers, to its number of packs.

    `sizes`, `[c, g]`, are the g lengths of each class, none over its capacity, `[g]`; `counts`, `[c]`, its
    sequences; `depth` the most of them in a pack.
    """
    shares = sizes / capacities
    order = np.lexsort((-shares.sum(axis=1), -shares.max(axis=1)))
    sizes, left = sizes[order], np.array(counts, np.int64)[order]
    strategies = Counter()
    first = 0
    while True:
        while first < len(left) and not left[first]:
            first += 1
        if first == len(left):
            return {tuple(sorted(key)): int(count) for key, count in sorted(strategies.items())}
        members, room, available, place = [], np.array(capacities, np.int64), left.copy(), first
        while True:
            members.append(place)
            available[place] -= 1
            room = room - sizes[place]
            fits = (available[place:] > 0) & np.all(sizes[place:] <= room, axis=1)
            if len(members) == depth or not fits.any():
                break
            place += int(np.argmax(fits))
        used, times = np.unique(members, return_counts=True)
        repeats = int((left[used] // times).min())
        left[used] -= repeats * times
        strategies[tuple(sorted(order[members].tolist()))] += repeats


def lower_bound(sizes, counts, capacities, depth):
    """Fewest packs that the totals allow."""
    totals = counts @ sizes
    return int(max(*(-(-totals // capacities)), -(-int(counts.sum()) // depth)))
