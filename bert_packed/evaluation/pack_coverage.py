"""Choice of the packs of an audit, and the places of a pack that they cover.

A mask may be wrong from some place of a pack on, from some sequence on, or in some tile of a kernel. Only
packs with a boundary there show it, and the first packs of a file may have none.

Legend: B packs, S pack length, K sequences per pack, X what a pack may show, C packs to choose from.
"""

import numpy as np
from tqdm import tqdm

from bert_packed.data.read_order import PackIndex
from bert_packed.kernels.choose import TILE
from bert_packed.records.examples import parse_examples
from bert_packed.records.tfrecords import FRAME_BYTES, read_batches
from bert_packed.schema import INPUT_MASK

TILES = (TILE, 32)  # tokens; 32 is the GPU's in float32, of which other tiles and chunks are multiples


def choose_packs(files, spec, num_packs):
    """Choose packs of every depth, and with a boundary in every tile, as far as `num_packs` allow.

    Reads the sequence ids of all packs. Memory holds 9 bytes for each pack, and at most a candidate for each
    depth with a boundary in each tile.

    Args:
        files, spec: Paths of packed TFRecord files, and their `PackSpec`.
        num_packs: Most packs to choose. Those that are not needed are spread over the files.

    Returns:
        `PackIndex` of the files; numbers of the packs, ascending int64 `[n]`; and bool `[X]`, as from
        `show_boundaries`: what only other packs show. `InputError` where a record is damaged.
    """
    index, numbers_C, shown_CX, is_shared = _find_candidates(files, spec)
    depths_C = np.argmax(shown_CX[:, : spec.max_sequences_per_pack], axis=1)
    missing_X, chosen = shown_CX.any(axis=0), []
    while missing_X.any() and len(chosen) < num_packs:
        # The deepest of those that show most: a fault may begin at the last sequence
        best = np.lexsort((depths_C, (shown_CX & missing_X).sum(axis=1)))[-1]
        missing_X &= ~shown_CX[best]
        chosen.append(best)
    others = np.setdiff1d(np.arange(index.num_packs), numbers_C[chosen])
    if is_shared[others].sum() >= num_packs - len(chosen):  # packs of one sequence show no neighbor
        others = others[is_shared[others]]
    num_more = min(num_packs - len(chosen), len(others))
    places = (2 * np.arange(num_more) + 1) * len(others) // max(2 * num_more, 1)
    return index, np.sort(np.concatenate([numbers_C[chosen], others[places]])), missing_X


def show_boundaries(sequence_ids_BS, num_slots):
    """What packs show, bool `[B, X]`: a depth of 1..K, and for each of `TILES` the tiles with a boundary.

        sequence ids   1 1 | 1 2 | 2 0   ->   depth   0 1 0
        tiles of 2                            tiles   0 1 0

    `sequence_ids_BS` are of any integer type, 0 is padding.
    """
    is_boundary_BS = _find_boundaries(sequence_ids_BS)
    depths_B = (sequence_ids_BS[:, 0] > 0) + is_boundary_BS.sum(axis=1)
    starts = [np.arange(0, sequence_ids_BS.shape[1], tile) for tile in TILES]
    tiles = [np.logical_or.reduceat(is_boundary_BS, places, axis=1) for places in starts]
    return np.hstack([depths_B[:, None] == np.arange(1, num_slots + 1), *tiles])


def describe_boundaries(sequence_ids_BS, num_slots, missing_X=None):
    """A line on the depths of packs and the places of their boundaries.

    "packs of 1 to 3 sequences, of at most 4; sequences begin behind others at 5 to 90, in 3 of 4 tiles of 32
    tokens; a larger num_packs would show tiles at 96". `missing_X` is from `choose_packs`.
    """
    shown_X = show_boundaries(sequence_ids_BS, num_slots).any(axis=0)
    places = np.flatnonzero(_find_boundaries(sequence_ids_BS).any(axis=0))
    tile, num_tiles = TILES[-1], -(-sequence_ids_BS.shape[1] // TILES[-1])
    line = (
        f"packs of {_join_runs(np.flatnonzero(shown_X[:num_slots]) + 1)} sequences, of at most {num_slots}; "
        f"sequences begin behind others {f'at {places[0]} to {places[-1]}, ' if len(places) else ''}in "
        f"{shown_X[-num_tiles:].sum()} of {num_tiles} tiles of {tile} tokens"
    )
    if missing_X is None or not missing_X.any():
        return line
    depths, tiles = np.flatnonzero(missing_X[:num_slots]) + 1, np.flatnonzero(missing_X[-num_tiles:])
    more = [f"packs of {_join_runs(depths)} sequences"] if len(depths) else []
    more += [f"tiles at {', '.join(map(str, tiles * tile))}"] if len(tiles) else []
    return f"{line}; a larger num_packs would show {' and '.join(more)}"


def describe_places(batch, length, name):
    """A line on the places, modulo `length`, at which sequences of a batch begin behind others of a pack.

    A fault may show at some places alone: "sequences begin at 3 of 4 places of the scan's chunks of 4 tokens;
    not covered: 2". `name` is what computes `length` tokens at once.
    """
    begins_BS = (np.asarray(batch["position_ids"]) == 0) & (np.asarray(batch["sequence_ids"]) > 0)
    found = {int(place) % length for place in np.flatnonzero(begins_BS[:, 1:].any(axis=0)) + 1}
    missing = sorted(set(range(length)) - found)
    return f"sequences begin at {len(found)} of {length} places of {name} of {length} tokens" + (
        f"; not covered: {_join_runs(missing)}" if missing else ""
    )


def _find_candidates(files, spec):
    """`PackIndex`, packs that show what packs of their depth before them do not, and which hold several.

    Numbers `[C]`, what these packs show `[C, X]`, and bool of all packs.
    """
    lengths, depth = {INPUT_MASK: spec.max_seq_length}, spec.max_sequences_per_pack
    seen_KX = show_boundaries(np.zeros((depth, spec.max_seq_length), np.int64), depth)  # nothing
    starts, offsets, numbers, shown, is_shared = [0], [], [], [seen_KX[:0]], [np.zeros(0, bool)]
    with tqdm(desc="choosing packs", unit=" packs", disable=None) as bar:
        for path in files:
            sizes = [np.zeros(1, np.int64)]
            for records in read_batches(path):
                ids_BS = parse_examples(records, lengths, narrow=lengths)[INPUT_MASK]
                shown_BX = show_boundaries(ids_BS, depth)
                depths_B = np.argmax(shown_BX[:, :depth], axis=1)
                is_shared.append(shown_BX[:, 1:depth].any(axis=1))
                for row in np.flatnonzero((shown_BX & ~seen_KX[depths_B]).any(axis=1)):
                    seen_X = seen_KX[depths_B[row]]
                    if (shown_BX[row] & ~seen_X).any():  # an earlier pack of the batch may have shown it
                        seen_X |= shown_BX[row]
                        numbers.append(starts[-1] + records.number - 1 + row)
                        shown.append(shown_BX[row : row + 1])
                sizes.append(records.ends - records.starts + FRAME_BYTES)
                bar.update(len(records))
            offsets.append(np.cumsum(np.concatenate(sizes)))
            starts.append(starts[-1] + len(offsets[-1]) - 1)
    index = PackIndex([str(path) for path in files], np.array(starts), offsets)
    return index, np.array(numbers, np.int64), np.concatenate(shown), np.concatenate(is_shared)


def _find_boundaries(sequence_ids_BS):
    """Where a sequence begins behind another: bool `[B, S]`."""
    is_boundary_BS = sequence_ids_BS > 0
    is_boundary_BS[:, 0] = False
    is_boundary_BS[:, 1:] &= sequence_ids_BS[:, 1:] != sequence_ids_BS[:, :-1]
    return is_boundary_BS


def _join_runs(numbers):
    """Ascending whole numbers as text: "0 to 2, 5"."""
    numbers = np.asarray(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
