"""Fine-tuning batches of labelled sequences, and predictions by sequence.

Legend: B packs per batch, S pack length, K sequences per pack, C classes, n sequences.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from bert_packed.assembly.update_packs import assemble_filled, by_slot
from bert_packed.objectives.features import PREDICTIONS, SEQUENCES
from bert_packed.records.sequences import Sequences


@dataclasses.dataclass(frozen=True)
class LabelledSequences:
    """n sequences with labels."""

    sequences: Sequences  # their predictions, if any, are labels of tokens
    labels: dict[str, np.ndarray]  # from the name in a batch to [n]
    # Labels that are token positions, counted from the start of the sequence here, of the pack in a batch
    positions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # names by number
    texts_per_row: int = 1  # consecutive sequences that a step takes together


def make_batch(data, packs, spec, num_packs):
    """A batch of B = `num_packs` packs: at most B `Packs` of `LabelledSequences`, and empty ones.

    Returns:
        Dict of int32 and float32 arrays: `token_ids`, `sequence_ids`, `token_type_ids`, `position_ids`
        `[B, S]`; `cls_positions`, `slot_weights` and the labels `[B, K]`; if sequences have predictions
        `prediction_positions`, `prediction_ids` and `prediction_sequences` `[B, P]`.
    """
    arrays = assemble_filled(data.sequences, packs, spec, num_packs)
    features = (*SEQUENCES, *PREDICTIONS) if len(data.sequences["prediction_ids"]) else SEQUENCES
    batch = {feature.name: arrays[feature.record_name] for feature in features}
    for name, values in data.labels.items():
        slots_BK = by_slot(values, packs, spec.max_sequences_per_pack, num_packs)
        # An unused slot keeps 0: its [CLS] position is 0 too
        batch[name] = slots_BK + batch["cls_positions"] if name in data.positions else slots_BK
    return batch


def train_batches(data, updates, num_packs, first_step=0, part_of=np.asarray) -> Iterator[dict]:
    """Batches of the steps from `first_step` on; `updates` are of `update_packs`.

    Those of rows have `places`, int32 `[B, K]`, too: see `Updates`. `part_of` is a function from an array of
    all packs of a step to that of the packs to compute here.
    """
    for step in range(first_step, len(updates.packs)):
        packs = updates.packs[step]
        batch = make_batch(data, packs, updates.spec, num_packs)
        if updates.places:
            batch["places"] = np.zeros_like(batch["cls_positions"])
            batch["places"][packs.owners, packs.slots] = updates.places[step]
        yield {name: part_of(values) for name, values in batch.items()}


def predict(forward, sequences, packs, spec, batch_size):
    """Run a model on packs: dict from output name to a list of n arrays, `[tokens]`, `[tokens, C]` or `[C]`.

    Args:
        forward: Compiled function from a batch to a dict of outputs: `[B, S]` or `[B, S, C]` for tokens,
            `[B, K, C]` for sequences.
        sequences: n `Sequences` without predictions, whose order the outputs have.
        packs, spec: Result of `update_packs.pack_all`.
        batch_size: B; the last batch is filled with empty packs.
    """
    data, found = LabelledSequences(sequences, {}), {}
    starts = range(0, len(packs), batch_size)
    for first in tqdm(starts, desc="predict", unit="batch", disable=None):
        some = packs.between(first, min(first + batch_size, len(packs)))
        batch = make_batch(data, some, spec, batch_size)
        for name, values in forward(batch).items():
            own = found.setdefault(name, [None] * len(sequences))
            _give_back(np.asarray(values), batch, some, sequences["lengths"], own)
    return found


def _give_back(values, batch, packs, lengths, own):
    # K < S, since each sequence has [CLS] and [SEP]
    by_token = values.shape[1] == batch["token_ids"].shape[1]
    for row in range(len(packs)):
        members = packs.members[packs.offsets[row] : packs.offsets[row + 1]]
        for slot, sequence in enumerate(members):
            start = batch["cls_positions"][row, slot]
            place = slice(start, start + lengths[sequence]) if by_token else slot
            own[sequence] = values[row, place].copy()  # a view would keep the whole batch
