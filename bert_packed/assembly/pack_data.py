"""All that packing asks of a kind of records: `BertData`, `CausalData` and `FeatureData` answer.

The steps of `pack_steps.py` move *columns* between files, which `run_files.py` describes, and know of them
only `layout`, `file_indices` and `record_numbers`; everything else about a sequence is behind these members.
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bert_packed.assembly.assignment import Packs
from bert_packed.records.sequences import Column, Sequences

Columns = Sequences


@runtime_checkable
class PackData(Protocol):
    """One kind of records. Instances are frozen and travel to other processes.

    "Length" below is what a plan is made for: tokens of a sequence or, where a sequence has several lengths,
    the number of its class.
    """

    @property
    def layout(self) -> dict[str, Column]:
        """The columns that hold a sequence; among them `file_indices` and `record_numbers`."""

    @property
    def measured_columns(self) -> tuple[str, ...]:
        """The columns that `lengths` and `measure` need: no others are read for them."""

    @property
    def num_lengths(self) -> int:
        """Lengths are below it."""

    def read(self, path: str) -> Iterator[tuple[Columns, int, dict[str, int]]]:
        """Read, check and fit one file.

        Yields:
            Columns of a batch, of those sequences that are to be packed; its number of records; dict of how
            many sequences were "truncated" and "dropped".

        Raises:
            InputError: a record cannot be used.
        """

    def lengths(self, columns: Columns) -> np.ndarray:
        """The length of each sequence: int `[n]`, each from 1 and below `num_lengths`."""

    def describe_lengths(self, histogram: np.ndarray) -> dict:
        """What a manifest says of a histogram, int64 `[num_lengths]`: plain JSON."""

    def make_plan(self, histogram: np.ndarray, algorithm: str, depth: int | str) -> dict:
        """Plan the packs for a histogram, int64 `[num_lengths]`.

        Returns:
            Dict of plain JSON for the manifest, as `length_plan.plan_lengths` returns it: `plan` with its
            `strategies`, `num_packs`, `packing_factor`, `depth` and others.

        Raises:
            InputError: the algorithm cannot do it.
        """

    def measure(self, columns: Columns, packs: Packs) -> int:
        """What the fullest of some packs needs that the plan does not know: predictions, of BERT's; or 0."""

    def make_spec(self, depth: int, measured: int) -> Any:
        """The shapes of a packed record: a dataclass with `max_sequences_per_pack`.

        Args:
            depth: K.
            measured: The largest number of all that `measure` found.

        Raises:
            InputError: the settings leave less room than the packs need.
        """

    def pack_bytes(self, depth: float) -> int:
        """About how many bytes the columns of a full pack take, which holds `depth` sequences."""

    def assemble(self, columns: Columns, packs: Packs, spec: Any) -> dict[str, np.ndarray]:
        """The packed records: dict from feature to array `[packs, ...]`, as `make_spec` shaped them."""
