"""Plan, pack and unpack sequences in memory: lists or columns in, NumPy arrays out.

    sequences  [[5 6 7] [8 9]]   ->   input_ids       [[8 9 5 6 7 0]]
                                      sequence_ids    [[1 1 2 2 2 0]]     0 is padding
                                      position_ids    [[0 1 0 1 2 0]]     restarts in every sequence
                                      sequence_index  [[1 0]]             which they are; -1 in an unused slot

Legend: n sequences, B packs, S pack length, K sequences per pack.
"""

import itertools
from collections.abc import Mapping

import numpy as np

from bert_packed.assembly.assignment import assign_sequences
from bert_packed.assembly.online_assembly import packs_of_stream
from bert_packed.assembly.packs import find_places
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.histogram import check_lengths, check_limits, count_lengths
from bert_packed.packing.online import OnlinePacker
from bert_packed.packing.plan import make_plan, validate_plan
from bert_packed.records.sequences import Column, Sequences, range_indices

TOKENS = "input_ids"  # whose lengths are those of the sequences
SEQUENCE_IDS, POSITION_IDS, SEQUENCE_INDEX = MADE = ("sequence_ids", "position_ids", "sequence_index")
LENGTHS = "lengths"
READ_AT_ONCE = 1_000  # sequences of a stream


def plan(lengths, max_seq_length, max_sequences_per_pack="max", algorithm=DEFAULT_ALGORITHM):
    """Plan packs for sequences of these lengths.

        plan([5, 3, 3], max_seq_length=8).strategies   ->   {(3,): 1, (3, 5): 1}

    Args:
        lengths: Whole numbers `[n]` in 1..S.
        max_seq_length: S, the tokens of a pack.
        max_sequences_per_pack: A whole number from 1, or "max" for no limit.
        algorithm: One of `bert_packed.packing.algorithms.ALGORITHMS`.

    Returns:
        A `bert_packed.packing.plan.PackingPlan`, with `num_packs`, `efficiency`, `packing_factor` and
        `certificate`, the proof of how many packs fewer there could be.

    Raises:
        ValueError: an argument breaks its rule.
    """
    if algorithm not in ALGORITHMS:
        raise InputError(f"`algorithm` must be one of {', '.join(ALGORITHMS)}. Received: {algorithm!r}.")
    check_limits(max_seq_length, max_sequences_per_pack)
    histogram = count_lengths(lengths, max_seq_length)
    made = ALGORITHMS[algorithm](histogram, max_seq_length, max_sequences_per_pack)
    validate_plan(made, histogram)
    return made


def pack(
    sequences,
    max_seq_length,
    max_sequences_per_pack="max",
    *,
    algorithm=DEFAULT_ALGORITHM,
    seed=0,
    padding=None,
):
    """Pack sequences by the plan for all of them, each exactly once; the module shows a pack.

    Args:
        sequences: n lists or arrays of token ids. Or a dict of columns with n entries each, `input_ids` among
            them, as tokenizers of Hugging Face return: an entry with one value a token, such as labels, is
            packed along; one that is a single number goes to its sequence's slot. An `attention_mask` of ones
            is left out: packs have another one, `attention_mask(packs["sequence_ids"])`.
        max_seq_length, max_sequences_per_pack, algorithm: As in `plan`.
        seed: Shuffles packs, and sequences of equal length.
        padding: Dict from column to the value of its padding; 0 for others. `{"labels": -100}`, for example.

    Returns:
        Dict of arrays. `[B, S]`: `input_ids`, other columns with a value a token, and int64 `sequence_ids`
        (1..K, 0 is padding) and `position_ids` (from 0 in every sequence). `[B, K]`: columns with a value a
        sequence, and int64 `sequence_index`, the sequence of each slot, -1 where it is unused.

    Raises:
        ValueError: an argument breaks its rule; the message names column and sequence.
    """
    columns = _read_columns(sequences, max_seq_length)
    made = plan(columns[LENGTHS], max_seq_length, max_sequences_per_pack, algorithm)
    packs = assign_sequences(made, columns[LENGTHS], seed)
    return _assemble(columns, packs, max_seq_length, made.depth, padding)


def pack_stream(
    sequences,
    max_seq_length,
    max_sequences_per_pack="max",
    *,
    buffer=10_000,
    padding=None,
):
    """Pack sequences as they come, with at most `buffer` of them in memory.

    Args:
        sequences: Iterable, possibly endless, of lists of token ids, or of dicts from column to the value of
            one sequence, as in `pack`.
        max_seq_length, max_sequences_per_pack: As in `plan`.
        buffer: Sequences that wait for others that fit, at most. More are better packed.
        padding: As in `pack`.

    Yields:
        Dicts of arrays as from `pack`, whenever the buffer is full, of the packs with least padding; at the
        end those of all that waited. B differs between them. K is `max_sequences_per_pack`, or of "max" the
        depth of these packs. `sequence_index` counts the sequences of the stream.
    """
    packer = OnlinePacker(max_seq_length, max_sequences_per_pack, buffer_size=buffer)
    for columns, packs in packs_of_stream(_read_stream(sequences, max_seq_length), packer):
        depth = int(packs.depths.max()) if max_sequences_per_pack == "max" else max_sequences_per_pack
        yield _assemble(columns, packs, max_seq_length, depth, padding)


def unpack(packs):
    """The sequences of packs, in the order of `sequence_index`: the inverse of `pack`.

    Args:
        packs: Dict of arrays from `pack` or `pack_stream`, and any further columns `[B, S, ...]` or
            `[B, K, ...]`, outputs of a model, for example. Where S = K, columns are `[B, S]`.

    Returns:
        A list of n arrays of token ids; with further columns a dict from each column to its list.
    """
    packs = {name: np.asarray(values) for name, values in packs.items()}
    if missing := [name for name in (TOKENS, SEQUENCE_IDS, SEQUENCE_INDEX) if name not in packs]:
        raise InputError(f"`packs` must have {missing[0]}, as `pack` makes it. Received: {', '.join(packs)}.")
    ids_BS, index_BK = packs[SEQUENCE_IDS], packs[SEQUENCE_INDEX]
    is_used_BK = index_BK >= 0
    counts = np.apply_along_axis(np.bincount, 1, ids_BS, minlength=index_BK.shape[1] + 1)[:, 1:]
    if counts.shape != index_BK.shape or ((counts > 0) != is_used_BK).any():
        raise InputError(f"`packs` must have as many sequences in {SEQUENCE_IDS} as in {SEQUENCE_INDEX}.")
    order, ends = np.argsort(index_BK[is_used_BK], kind="stable"), np.cumsum(counts[is_used_BK])[:-1]
    unpacked = {}
    for name in [name for name in packs if name not in MADE]:
        values = packs[name]
        if values.shape[:2] == ids_BS.shape:
            parts = np.split(values[ids_BS > 0], ends)
        elif values.shape[:2] == index_BK.shape:
            parts = list(values[is_used_BK])
        else:
            raise InputError(
                f"`packs` must have shapes {list(ids_BS.shape)} or {list(index_BK.shape)} first. "
                f"Received: {name} of shape {list(values.shape)}."
            )
        unpacked[name] = [parts[place] for place in order]
    return unpacked if len(unpacked) > 1 else unpacked[TOKENS]


def verify_plan(packs, lengths, max_seq_length, max_sequences_per_pack="max"):
    """Check packs made by anybody: each sequence exactly once, none too full, and how good they are.

        verify_plan([[1], [0, 2]], lengths=[5, 8, 3], max_seq_length=8).certificate.gap   ->   0.0

    Args:
        packs: Lists of indices of sequences, from 0, as packers of other libraries give them; or the dict of
            `pack`.
        lengths: Whole numbers `[n]`, of the sequences.
        max_seq_length, max_sequences_per_pack: Limits of a pack, as in `plan`.

    Returns:
        A `PackingPlan` of these packs. Its `certificate` has the fewest packs that are possible by the proof
        of our own plan, and the gap to them.

    Raises:
        ValueError: a sequence is missing or packed twice, or a pack breaks a limit; the message names it.
    """
    depth = check_limits(max_seq_length, max_sequences_per_pack)
    lengths = check_lengths(lengths, max_seq_length)
    if isinstance(packs, Mapping):
        packs = [row[row >= 0] for row in np.asarray(packs[SEQUENCE_INDEX])]
    members = [np.asarray(one, np.int64) if len(one) else np.zeros(0, np.int64) for one in packs]
    seen = np.zeros(len(lengths), np.int64)
    for number, one in enumerate(members):
        where = f"pack {number}"
        if not 1 <= len(one) <= depth:
            raise InputError(f"{where} must hold 1 to {depth} sequences. Received: {len(one)}.")
        if one.min() < 0 or one.max() >= len(lengths):
            raise InputError(f"{where} must hold indices from 0 and below {len(lengths)}. Received: {one}.")
        if lengths[one].sum() > max_seq_length:
            raise InputError(
                f"{where} must hold at most {max_seq_length} tokens. Received: {lengths[one].sum()}."
            )
        np.add.at(seen, one, 1)
    if (seen != 1).any():
        wrong = int(np.argmax(seen != 1))
        raise InputError(f"sequence {wrong} must be packed once. Received: {seen[wrong]} times.")
    strategies = [(lengths[one].tolist(), 1) for one in members]
    limits = max_seq_length, max_sequences_per_pack
    given = make_plan("given", *limits, strategies)
    if given.certificate.gap:  # by the bounds that cost nothing; our own plan proves a better one
        ours = plan(lengths, *limits)
        given = make_plan("given", *limits, strategies, dual_values=ours.dual_values)
    return given


def _read_stream(sequences, max_seq_length):
    """`Sequences` of parts of a stream, of which only the first tells which columns there are."""
    sequences, first, names, kinds = iter(sequences), 0, None, None
    while part := list(itertools.islice(sequences, READ_AT_ONCE)):
        if isinstance(part[0], Mapping):
            names = names or list(part[0])
            for number, one in enumerate(part, first):
                if not isinstance(one, Mapping) or list(one) != names:
                    raise InputError(f"sequence {number} must have the columns {', '.join(names)}.")
            part = {name: [one[name] for one in part] for name in names}
        columns = _read_columns(part, max_seq_length, first)
        sizes = {name: column.sizes for name, column in columns.layout.items()}
        if sizes != (kinds := kinds or sizes):
            wrong = next(name for name in sizes if sizes[name] != kinds.get(name))
            raise InputError(f"{wrong} must be a list in every sequence, or in none.")
        yield columns
        first += len(columns)


def _read_columns(sequences, max_seq_length, first=0):
    """`Sequences` of lists or of a dict of columns, numbered from `first`."""
    given = dict(sequences) if isinstance(sequences, Mapping) else {TOKENS: sequences}
    if TOKENS not in given:
        raise InputError(f"`sequences` must have a column {TOKENS}. Received: {', '.join(map(str, given))}.")
    if taken := [name for name in given if name in (*MADE, LENGTHS)]:
        raise InputError(f"`sequences` must not have a column {taken[0]}, which packing makes.")
    tokens = _read_column(TOKENS, given.pop(TOKENS), first)
    if tokens and not tokens[0].ndim:
        raise InputError(f"`sequences` must be lists of token ids. Received: {tokens[0]!r:.100}.")
    lengths = np.array([len(one) for one in tokens], np.int64)
    if not lengths.all():
        raise InputError(f"sequence {first + int(np.argmin(lengths))} must have a token. Received: none.")
    if (lengths > max_seq_length).any():
        wrong = int(np.argmax(lengths > max_seq_length))
        raise InputError(
            f"sequence {first + wrong} must have at most max_seq_length={max_seq_length} tokens. "
            f"Received: {lengths[wrong]}."
        )
    columns = {TOKENS: tokens, **{name: _read_column(name, one, first) for name, one in given.items()}}
    for name, values in columns.items():
        if len(values) != len(tokens):
            raise InputError(
                f"every column must have {len(tokens)} entries, as {TOKENS}. "
                f"Received: {name} with {len(values)}."
            )
        for number, (value, length) in enumerate(zip(values, lengths.tolist(), strict=True), first):
            if value.ndim and len(value) != length:
                raise InputError(
                    f"sequence {number}: {name} must have a value for each of its {length} tokens, or a "
                    f"single one. Received: {len(value)}."
                )
    mask = columns.pop("attention_mask", [])
    for number, values in enumerate(mask, first):
        if not values.all():
            raise InputError(f"sequence {number} must be without padding. Received: attention_mask with 0.")
    numbers = np.arange(first, first + len(tokens))
    layout = {SEQUENCE_INDEX: Column("<i8"), LENGTHS: Column("<i8")}
    flat = {SEQUENCE_INDEX: numbers, LENGTHS: lengths}
    for name, values in columns.items():
        layout[name], flat[name] = _flatten(values)
    return Sequences(layout, flat)


def _read_column(name, values, first):
    """The entries of a column as arrays `[length]`, or all `[]`."""
    arrays = []
    for number, value in enumerate(values, first):
        try:
            array = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            raise InputError(f"sequence {number}: {name} must be a list of numbers: {error}.") from error
        if (array.dtype.kind not in "biuf" and array.size) or array.ndim > 1:
            raise InputError(
                f"sequence {number}: {name} must be a list of numbers, or one. Received: {value!r:.100}."
            )
        if array.ndim != (arrays or [array])[0].ndim:
            raise InputError(
                f"{name} must be a list in every sequence, or in none. Received: {value!r:.100}."
            )
        arrays.append(array)
    return arrays


def _flatten(values):
    """`Column` and content of entries."""
    dtype = np.result_type(*{one.dtype for one in values}) if values else np.dtype(np.int64)
    if values and not values[0].ndim:
        return Column(dtype.str), np.array(values, dtype)
    return Column(dtype.str, LENGTHS), np.concatenate([*values, np.zeros(0, dtype)], dtype=dtype)


def _assemble(sequences, packs, max_seq_length, depth, padding):
    """The arrays of `pack` for `Packs` of `Sequences`."""
    padding = dict(padding or {})
    if unknown := padding.keys() - sequences.layout.keys() | padding.keys() & {SEQUENCE_INDEX, LENGTHS}:
        raise InputError(f"`padding` must be for columns of the sequences. Received: {sorted(unknown)[0]}.")
    num_packs = len(packs)
    source, target, _ = find_places(sequences, packs, TOKENS, max_seq_length)
    slots = packs.owners * depth + packs.slots

    def put(name, places, values, row_length, fill=0):
        dtype = np.result_type(values.dtype, np.min_scalar_type(fill))  # -100 in a column of bytes
        arrays[name] = np.full((num_packs, row_length), fill, dtype)
        arrays[name].reshape(-1)[places] = values

    arrays = {}
    lengths = sequences[LENGTHS][packs.members]
    for name, column in sequences.layout.items():
        if column.sizes:
            put(name, target, sequences[name][source], max_seq_length, padding.get(name, 0))
        elif name != LENGTHS:
            fill = -1 if name == SEQUENCE_INDEX else padding.get(name, 0)
            put(name, slots, sequences[name][packs.members], depth, fill)
    put(SEQUENCE_IDS, target, np.repeat(packs.slots + 1, lengths), max_seq_length)
    put(POSITION_IDS, target, range_indices(np.zeros(len(lengths)), lengths), max_seq_length)
    return arrays
