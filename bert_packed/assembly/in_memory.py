"""Plan, pack and unpack sequences in memory: lists or columns in, NumPy arrays out.

    sequences  [[5 6 7] [8 9]]   ->   input_ids       [[8 9 5 6 7 0]]
                                      sequence_ids    [[1 1 2 2 2 0]]     0 is padding
                                      position_ids    [[0 1 0 1 2 0]]     restarts in every sequence
                                      sequence_index  [[1 0]]             which they are; -1 in an unused slot

Legend: n sequences, B packs, S pack length, K sequences per pack.
"""

from collections.abc import Mapping

import numpy as np

from bert_packed.assembly.assignment import assign_sequences, find_places
from bert_packed.assembly.given_columns import (
    LENGTHS,
    MADE,
    POSITION_IDS,
    READ_AT_ONCE,
    SEQUENCE_IDS,
    SEQUENCE_INDEX,
    TOKENS,
    read_columns,
    read_stream,
    refuse,
    type_with_padding,
)
from bert_packed.assembly.online_assembly import packs_of_stream
from bert_packed.packing.algorithms import ALGORITHMS, DEFAULT_ALGORITHM
from bert_packed.packing.arguments import MAX_SEED, WHOLE, as_array, check_choice, check_whole, iterate, shown
from bert_packed.packing.histogram import check_lengths, check_limits, count_lengths
from bert_packed.packing.online import OnlinePacker
from bert_packed.packing.plan import make_plan, validate_plan
from bert_packed.records.sequences import range_indices


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
    check_choice("algorithm", algorithm, ALGORITHMS)
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
            is left out: packs have another one, `attention_mask(packs["sequence_ids"])`. Any other is an
            error, such as one that numbers the sequences of a row. The names of what is made, and `lengths`,
            cannot be columns.
        max_seq_length, max_sequences_per_pack, algorithm: Arguments of `plan`.
        seed: Seed of the shuffles of packs and of sequences of equal length.
        padding: Dict from column to the value of its padding; 0 for others. `{"labels": -100}`, for example.

    Returns:
        Dict of arrays. `[B, S]`: `input_ids`, other columns with a value a token, and int64 `sequence_ids`
        (1..K, 0 is padding) and `position_ids` (from 0 in every sequence). `[B, K]`: columns with a value a
        sequence, and int64 `sequence_index`, the sequence of each slot, -1 where it is unused. K is the depth
        of the plan, and one more where that is S: by K, both kinds of columns are told apart.

    Raises:
        ValueError: an argument breaks its rule; the message names column and sequence.
    """
    check_limits(max_seq_length, max_sequences_per_pack)
    check_whole("seed", seed, maximum=MAX_SEED)
    columns = read_columns(sequences, max_seq_length)
    made = plan(columns[LENGTHS], max_seq_length, max_sequences_per_pack, algorithm)
    packs = assign_sequences(made, columns[LENGTHS], seed)
    return _assemble(columns, packs, max_seq_length, made.depth, padding)


def pack_stream(sequences, max_seq_length, max_sequences_per_pack="max", *, buffer=10_000, padding=None):
    """Pack sequences as they come, with few of them in memory.

    Args:
        sequences: Iterable, possibly endless, of lists of token ids, or of dicts from column to the value of
            one sequence, as in `pack`.
        max_seq_length, max_sequences_per_pack: Limits of a pack, as in `plan`.
        buffer: Sequences that wait for others that fit, at most. More are better packed. As many again, but
            1,000 at most, are read at once.
        padding: Values of padding, as in `pack`.

    Returns:
        An iterator of dicts of arrays as from `pack`: whenever the buffer is full, of the packs with least
        padding; at the end of all that waited. B differs between them. K is `max_sequences_per_pack`, or for
        "max" the depth of these packs, and one more where that is S. `sequence_index` counts the sequences of
        the stream.

    Raises:
        ValueError: an argument breaks its rule; in the iterator, a sequence does.
    """
    check_whole("buffer", buffer, 1)
    packer = OnlinePacker(max_seq_length, max_sequences_per_pack, buffer_size=buffer)
    depth = None if max_sequences_per_pack == "max" else min(max_sequences_per_pack, max_seq_length)
    sequences = iterate(sequences, "`sequences`", "be an iterable of lists, or of dicts")
    batches = read_stream(sequences, max_seq_length, min(buffer, READ_AT_ONCE))
    return (
        _assemble(columns, packs, max_seq_length, depth or int(packs.depths.max()), padding)
        for columns, packs in packs_of_stream(batches, packer)
    )


def unpack(packs):
    """The sequences of packs, in the order of `sequence_index`: the inverse of `pack`.

    Args:
        packs: Dict of arrays from `pack` or `pack_stream`, and any further columns `[B, S, ...]` or
            `[B, K, ...]`, outputs of a model, for example.

    Returns:
        A list of n arrays of token ids; with further columns a dict from each column to its list.

    Raises:
        ValueError: the packs have not the form that `pack` gives them.
    """
    ids_BS, index_BK, counts_BK = _read_slots(packs, (TOKENS, SEQUENCE_IDS, SEQUENCE_INDEX))
    is_used_BK = index_BK >= 0
    order, ends = np.argsort(index_BK[is_used_BK], kind="stable"), np.cumsum(counts_BK[is_used_BK])[:-1]
    found = index_BK[is_used_BK][order]
    if (found[1:] == found[:-1]).any():
        twice = found[1:][found[1:] == found[:-1]][0]
        refuse("`packs`", f"have each sequence once in {SEQUENCE_INDEX}", f"{twice} twice")
    unpacked = {}
    for name in [name for name in packs if name not in MADE]:
        values = as_array(packs[name], f"`packs`: {name}", "be an array", kinds=None)
        if values.shape[:2] == ids_BS.shape:
            parts = np.split(values[ids_BS > 0], ends)
        elif values.shape[:2] == index_BK.shape:
            parts = list(values[is_used_BK])
        else:
            rule = f"begin with {list(ids_BS.shape)} or {list(index_BK.shape)}"
            refuse("every column of `packs`", rule, f"{name} of shape {list(values.shape)}")
        unpacked[name] = [parts[place] for place in order]
    return unpacked if len(unpacked) > 1 else unpacked[TOKENS]


def verify_plan(packs, lengths, max_seq_length, max_sequences_per_pack="max"):
    """Check packs made by anybody: each sequence exactly once, none too full, and how good they are.

        verify_plan([[1], [0, 2]], lengths=[5, 8, 3], max_seq_length=8).certificate.gap   ->   0.0

    Args:
        packs: Indices of each pack's sequences, from 0: lists or arrays. Or the dict of `pack`,
            whose `sequence_ids` must agree with `lengths`.
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
        packs = _members_of(packs, lengths)
    seen, strategies = np.zeros(len(lengths), np.int64), []
    for number, indices in enumerate(iterate(packs, "`packs`", "hold a list of indices for each pack")):
        name, rule = f"`packs`: pack {number}", "be a list of whole numbers"
        if not hasattr(indices, "shape"):
            indices = list(iterate(indices, name, rule))
        members = as_array(indices, name, rule, WHOLE, (None,))
        if not 1 <= len(members) <= depth:
            refuse(name, f"hold 1 sequence, and at most {depth}", len(members))
        if members.min() < 0 or members.max() >= len(lengths):
            refuse(name, f"hold indices from 0 and below {len(lengths)}", shown(members.tolist()))
        members = members.astype(np.int64)
        if lengths[members].sum() > max_seq_length:
            refuse(name, f"hold at most {max_seq_length} tokens", lengths[members].sum())
        np.add.at(seen, members, 1)
        strategies.append((lengths[members].tolist(), 1))
    if (seen != 1).any():
        wrong = int(np.argmax(seen != 1))
        refuse("`packs`", f"hold sequence {wrong} once", f"{seen[wrong]} times")
    limits = max_seq_length, max_sequences_per_pack
    given = make_plan("given", *limits, strategies)
    if given.certificate.gap:  # by the bounds that cost nothing; our own plan proves a better one
        ours = plan(lengths, *limits)
        given = make_plan("given", *limits, strategies, dual_values=ours.dual_values)
    return given


def _read_slots(packs, names):
    """`sequence_ids` `[B, S]`, `sequence_index` and tokens of each slot `[B, K]` of packs with `names`."""
    if not isinstance(packs, Mapping):
        refuse("`packs`", "be a dict of arrays, as `pack` makes it", shown(packs))
    if missing := [name for name in names if name not in packs]:
        refuse("`packs`", f"have {missing[0]}, as `pack` makes it", ", ".join(map(str, packs)))
    ids_BS, index_BK = (
        as_array(packs[name], f"`packs`: {name}", f"be whole numbers {shape}", WHOLE, (None, None))
        for name, shape in ((SEQUENCE_IDS, "[B, S]"), (SEQUENCE_INDEX, "[B, K]"))
    )
    num_packs, num_slots = index_BK.shape
    rule = f"have {SEQUENCE_IDS} 1, 2, ... of the slots in {SEQUENCE_INDEX}, and then 0"
    if len(ids_BS) != num_packs:
        refuse("`packs`", rule, f"{list(ids_BS.shape)} and {list(index_BK.shape)}")
    last = np.where(ids_BS == 0, num_slots + 1, ids_BS)
    is_wrong = (np.diff(last, axis=1) < 0).any(axis=1) | ((ids_BS < 0) | (ids_BS > num_slots)).any(axis=1)
    counts = np.zeros((num_packs, num_slots + 1), np.int64)
    if not is_wrong.any():
        np.add.at(counts, (np.arange(num_packs)[:, None], ids_BS), 1)
        is_wrong = ((counts[:, 1:] > 0) != (index_BK >= 0)).any(axis=1)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        refuse("`packs`", rule, f"{shown(ids_BS[row].tolist())} in pack {row}")
    return ids_BS, index_BK, counts[:, 1:]


def _members_of(packs, lengths):
    """Indices of the sequences of each pack in the dict of `pack`, whose lengths are checked."""
    _, index_BK, counts_BK = _read_slots(packs, (SEQUENCE_IDS, SEQUENCE_INDEX))
    is_known = (index_BK >= 0) & (index_BK < len(lengths))  # others are an error later
    wanted_BK = np.where(is_known, lengths[np.where(is_known, index_BK, 0)] if len(lengths) else 0, counts_BK)
    if (wanted_BK != counts_BK).any():
        row, slot = np.argwhere(wanted_BK != counts_BK)[0]
        rule = f"have {wanted_BK[row, slot]} tokens, as in `lengths`"
        refuse(f"`packs`: sequence {index_BK[row, slot]}", rule, f"{counts_BK[row, slot]} in pack {row}")
    return [row[row >= 0] for row in index_BK]


def _assemble(sequences, packs, max_seq_length, depth, padding):
    """The arrays of `pack` for `Packs` of `Sequences`."""
    if not isinstance(padding, Mapping | None):
        refuse("`padding`", "be a dict from column to value", shown(padding))
    padding = dict(padding or {})
    if unknown := padding.keys() - sequences.layout.keys() | padding.keys() & {SEQUENCE_INDEX, LENGTHS}:
        refuse("`padding`", "be for columns of the sequences", min(unknown, key=str))
    num_packs = len(packs)
    depth += depth == max_seq_length  # `[B, S]` and `[B, K]` must differ
    source, target, _ = find_places(sequences, packs, TOKENS, max_seq_length)
    slots = packs.owners * depth + packs.slots
    lengths = sequences[LENGTHS][packs.members]

    def put(name, places, values, row_length, fill=0):
        dtype = type_with_padding(values.dtype, fill, name)
        arrays[name] = np.full((num_packs, row_length), fill, dtype)
        arrays[name].reshape(-1)[places] = values

    arrays = {}
    for name, column in sequences.layout.items():
        if column.sizes:
            put(name, target, sequences[name][source], max_seq_length, padding.get(name, 0))
        elif name != LENGTHS:
            fill = -1 if name == SEQUENCE_INDEX else padding.get(name, 0)
            put(name, slots, sequences[name][packs.members], depth, fill)
    put(SEQUENCE_IDS, target, np.repeat(packs.slots + 1, lengths), max_seq_length)
    put(POSITION_IDS, target, range_indices(0, lengths), max_seq_length)
    return arrays
