"""What the steps of packing do, each in bounded memory and by any process: read, sort, measure, write.

    input files ──► runs ──► sorted runs ──► parts ──► shards
               read     sort             measure, write

A *run* is a few million tokens of one input file, as columns on the disk (`spill.py`). A *part* is as many
packs that follow one another; a shard is made of whole parts. Sorting cuts each run into the sequences of
each part, so that writing a part reads one piece of every run, and nothing else.
"""

import dataclasses
import os

import numpy as np

from data_gen import files, progress, records
from data_gen.assignment import PackOrder, choose_slots, fill_packs, find_parts
from data_gen.example_bytes import serialize_examples
from data_gen.input_manifest import check_num_records
from data_gen.input_stamps import unchanged
from data_gen.provenance import write_provenance
from data_gen.spill import Column, join_rows, read_spill, take_rows, write_spill

RUN_TOKENS = 2**23  # of a run and of a part: 40 MB of BERT's columns, some hundred while they are joined
RUN_ROWS = 2**20  # likewise, for data of next to no tokens
PACKS_AT_ONCE = 512  # gathered and encoded together: 512 packs of S=512 take about 10 MB
SLOTS = {"slots": Column("<i8")}  # what sorting adds to the columns


@dataclasses.dataclass(frozen=True)
class ReadWork:
    """Read one input file into runs.

    Attributes:
        data: What the records are, such as `BertData`.
        stamp, file_index: The file, as `stamp_files` found it, and its number among the inputs.
        num_records: That it must hold; None where nobody says.
        folder: Where the runs go.
    """

    data: object
    stamp: list
    file_index: int
    num_records: int | None
    folder: str


@dataclasses.dataclass(frozen=True)
class SortWork:
    """Sort one run by part.

    Attributes:
        data: As in `ReadWork`.
        run, sorted_run: Paths: from, to.
        first_ranks, totals: Int arrays `[num_lengths]`: sequences of each length before the run, and in all.
        limits: Path of the array of slots before each part, `[num_parts + 1, num_lengths]`.
        seed: Of the assignment.
    """

    data: object
    run: str
    sorted_run: str
    first_ranks: np.ndarray
    totals: np.ndarray
    limits: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Part:
    """Packs that are assembled together.

    Attributes:
        index: Its number in the sorted runs.
        first, last: Its packs, the latter excluded.
    """

    index: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class PackWork:
    """What measuring and writing need to know.

    Attributes:
        data: As in `ReadWork`.
        strategies: Of the plan, with counts.
        sorted_runs: Tuple of paths.
        seed: Of the assignment.
    """

    data: object
    strategies: dict
    sorted_runs: tuple[str, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class ShardWork:
    """Write one shard.

    Attributes:
        pack_work: What to pack.
        parts: Tuple of `Part`, in order.
        path: Where to.
        spec: Shapes of the packed record.
        provenance: Path of the index of its sequences; "" for none.
    """

    pack_work: PackWork
    parts: tuple[Part, ...]
    path: str
    spec: object
    provenance: str


def read_file(work):
    """Read an input file into runs.

    Returns:
        Dict with the entry of the manifest, `path`, `num_records`, `sha256`; `num_overlong`, dict; and
        `runs`, list of [path, histogram `[num_lengths]`].

    Raises:
        InputError: a record cannot be used, or the file changes meanwhile.
    """
    path = work.stamp[0]
    with unchanged([work.stamp]):
        num_records, num_overlong, runs = _read_runs(work, path)
        checksum = records.file_sha256(path)  # with the block's promise: of what was read
    check_num_records(path, num_records, work.num_records)
    entry = {"path": path, "num_records": num_records, "sha256": checksum}
    return {"entry": entry, "num_overlong": num_overlong, "runs": runs}


def _read_runs(work, path):
    """Write the runs of a file: number of its records, dict of those overlong, and list as in `read_file`."""
    runs, held, num_records, num_overlong = [], [], 0, {}

    def flush():
        if not held:
            return
        columns = join_rows(held, work.data.LAYOUT)
        held.clear()
        columns["file_indices"] = np.full(len(columns["file_indices"]), work.file_index, np.int32)
        lengths = work.data.lengths(columns)
        run = os.path.join(work.folder, f"run-{work.file_index:05d}-{len(runs):05d}.spill")
        write_spill(run, columns, work.data.LAYOUT, [len(lengths)])
        runs.append([run, np.bincount(lengths, minlength=work.data.num_lengths).tolist()])

    for columns, num_read, overlong in work.data.read(path):
        num_records += num_read
        for name, count in overlong.items():
            num_overlong[name] = num_overlong.get(name, 0) + count
        if not len(columns["record_numbers"]):
            continue
        held.append(columns)
        num_tokens = sum(_num_values(part) for part in held)
        if num_tokens >= RUN_TOKENS or sum(len(part["record_numbers"]) for part in held) >= RUN_ROWS:
            flush()
    flush()
    return num_records, num_overlong, runs


def sort_run(work):
    """Give each sequence of a run its slot, and write the run in the order of the parts."""
    columns = dict(read_spill(work.run, work.data.LAYOUT))
    lengths = work.data.lengths(columns)
    slots = choose_slots(lengths, work.first_ranks, work.totals, work.seed)
    with files.open_file(work.limits) as file:
        limits = np.load(file)
    parts = find_parts(lengths, slots, limits)
    columns["slots"] = slots
    layout = {**work.data.LAYOUT, **SLOTS}
    columns = take_rows(columns, layout, np.argsort(parts, kind="stable"))
    write_spill(work.sorted_run, columns, layout, np.bincount(parts, minlength=len(limits) - 1))


def measure_part(work_and_part):
    """The fullest pack of a part, by what `data.measure` measures: int."""
    work, part = work_and_part
    columns, packs = _read_part(work, part, work.data.MEASURED)
    return work.data.measure(columns, packs)


def write_shard(work):
    """Assemble the packs of a shard and write them.

    Returns:
        The manifest's entry of the file: dict `name`, `num_records`, `sha256`.
    """
    origins = []

    def serialize():
        for part in work.parts:
            columns, packs = _read_part(work.pack_work, part)
            if work.provenance:
                origins.append(
                    (
                        np.diff(packs.offsets),
                        columns["file_indices"][packs.members],
                        columns["record_numbers"][packs.members],
                    )
                )
            for start in range(0, len(packs), PACKS_AT_ONCE):
                some = packs.part(start, min(start + PACKS_AT_ONCE, len(packs)))
                arrays = work.pack_work.data.assemble(columns, some, work.spec)
                yield from serialize_examples(arrays)
                progress.advance(len(some))

    entry = records.write_file(work.path, serialize())
    if work.provenance:
        write_provenance(work.provenance, origins)
    return entry.to_json()


def _read_part(work, part, names=None):
    """The sequences of a part, from all runs: dict of columns; and its `Packs`."""
    layout = {**work.data.LAYOUT, **SLOTS}
    wanted = None if names is None else {"slots", *names}
    pieces = [read_spill(path, layout, part.index, wanted) for path in work.sorted_runs]
    columns = join_rows(pieces, pieces[0])
    slot_lengths, depths = PackOrder(work.strategies, work.seed).slots(part.first, part.last)
    packs = fill_packs(slot_lengths, depths, work.data.lengths(columns), columns["slots"])
    return columns, packs


def _num_values(columns):
    return sum(values.size for values in columns.values())
