"""Online packing of a stream of sequences."""

import numpy as np

from bert_packed.assembly.assignment import Packs
from bert_packed.assembly.record_kinds import assemble_packs
from bert_packed.core.settings import InputError
from bert_packed.records.sequences import concatenate, take, to_offsets


def assemble_stream(batches, packer, spec, waiting=None):
    """Pack sequences as they arrive, keeping only those of the packer's buffer in memory.

    A pack with more predictions than P is split between two sequences, so nothing is dropped.

    Args:
        batches: Iterable of `Sequences`, possibly endless.
        packer: `OnlinePacker` for the spec's S and K.
        spec: `PackSpec`; an `InputError` names the first sequence that it has no room for.
        waiting: `Sequences` that wait in a resumed packer, in the order of `packer.waiting`.

    Yields dicts of arrays from `assemble_packs`; at the end of `batches` the sequences that wait, too.
    """

    def checked():
        for batch in batches:
            _check_fits(batch, spec)
            yield batch

    for sequences, packs in packs_of_stream(checked(), packer, waiting):
        made = sequences["num_predictions"][packs.members]
        depths = split_by_predictions(made, packs.depths, spec.max_predictions_per_pack)
        yield assemble_packs(sequences, Packs(packs.members, to_offsets(depths)), spec)


def packs_of_stream(batches, packer, waiting=None):
    """Yield (`Sequences` that wait, non-empty `Packs` of some of them) as they leave an `OnlinePacker`."""
    numbers, num_waiting = packer.waiting, 0 if waiting is None else len(waiting)
    if num_waiting != len(numbers):
        raise ValueError(
            f"`waiting` must be the sequences that wait in the packer, {len(numbers)} here. "
            f"Received: {num_waiting}."
        )
    for batch in batches:
        first = packer.num_arrived
        members, depths = packer.add(batch["lengths"])
        waiting = batch if waiting is None else concatenate([waiting, batch])
        numbers = np.concatenate([numbers, np.arange(first, packer.num_arrived)])
        if len(depths):
            yield waiting, Packs(np.searchsorted(numbers, members), to_offsets(depths))
            is_waiting = ~np.isin(numbers, members)
            waiting, numbers = take(waiting, is_waiting), numbers[is_waiting]
    members, depths = packer.flush()
    if len(depths):
        yield waiting, Packs(np.searchsorted(numbers, members), to_offsets(depths))


def split_by_predictions(num_predictions, sizes, limit):
    """Split packs with more predictions than `limit`, which no single sequence may exceed.

    num_predictions [5 4 3 2], sizes [3 1], limit 9   ->   sizes [2 1 1]
    """
    first_of_pack = to_offsets(sizes)[:-1]
    if (np.add.reduceat(num_predictions, first_of_pack) <= limit).all():
        return sizes
    is_first = np.isin(np.arange(len(num_predictions)), first_of_pack)
    found, room = [], 0
    for number, is_first_of_pack in zip(num_predictions.tolist(), is_first.tolist(), strict=True):
        if is_first_of_pack or number > room:
            found.append(0)
            room = limit
        found[-1] += 1
        room -= number
    return np.array(found, np.int64)


def _check_fits(batch, spec):
    for name, numbers, what in (
        ("max_seq_length", batch["lengths"], "tokens"),
        ("max_predictions_per_pack", batch["num_predictions"], "predictions"),
    ):
        limit = getattr(spec, name)
        if len(batch) and numbers.max() > limit:
            index = int(np.argmax(numbers > limit))
            raise InputError(
                f"{batch.origin(index)}: a sequence must have at most {name}={limit} {what}. "
                f"Received: {numbers[index]}."
            )
