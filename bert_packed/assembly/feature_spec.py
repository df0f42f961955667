"""The format of `--features=SPEC`: features of a record, and their capacity in a pack.

    inputs:int:512,targets:int:114                              T5 pairs: a sequence has two lengths
    audio:float*80:3000,text:int:400                            frames of 80 values, and their transcript
    atoms:int:128,places:float*3:=atoms,energy:float:each       molecules: three values per atom, one label

NAME:TYPE:CAPACITY. TYPE is int or float, with *N for N values per position. CAPACITY is the number of
positions in a pack, =NAME for a feature that is always as long as another, or `each` for one position per
sequence.
"""

import dataclasses
import re

from bert_packed.packing.histogram import MAX_LENGTH

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
        # Unambiguous: no name in a SPEC has a colon
        return f"{self.leader}:length" if self.leader else ""

    @property
    def is_leader(self):
        """True for a feature with its own capacity."""
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
    num_capacities = sum(spec.leader == spec.name for spec in specs.values())
    if num_capacities > MAX_CAPACITIES:
        raise ValueError(
            f"such that at most {MAX_CAPACITIES} have a capacity of their own, not {num_capacities}"
        )
    return tuple(specs.values())
