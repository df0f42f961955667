"""Checks of packs of `--split_sequences`: a sequence goes on in the next pack of its row, and in no other.

The packs are taken as training takes them, step after step and in micro-batches, each with the states that
the pack before it in its row has left. Two rows, two steps:

    pack 0, row 0    [a a a b]            pack 2, row 0    [b b . .]     takes over from pack 0
    pack 1, row 1    [c c c c]            pack 3, row 1    [d d d .]     begins with a sequence

Legend: N steps, R rows, S pack length, D model width.
"""

import functools

import numpy as np
from keras import ops

from bert_packed.core.settings import InputError
from bert_packed.evaluation.model_audit import Check
from bert_packed.training.backend import compiled


def take_rows(batch, num_rows):
    """The arrays of packs of rows that a Mamba reads, int32 `[N, R, S]`, by name.

    `batch` is a dict of NumPy arrays of packs, the first of their files, in that order. Raises `InputError`
    where no sequence goes on in another pack, or one goes on from another place than its row's pack before
    has reached.
    """
    used = np.flatnonzero((np.asarray(batch["slot_weights"]) > 0).any(axis=1))
    # The last packs of some rows are padding
    num_steps = min(-(-(used.max(initial=-1) + 1) // num_rows), len(batch["slot_weights"]) // num_rows)
    packs = {
        name: np.asarray(batch[name])[: num_steps * num_rows].reshape(num_steps, num_rows, -1)
        for name in ("token_ids", "sequence_ids", "position_ids")
    }
    positions_NRS = packs["position_ids"]
    first_NR, last_NR = positions_NRS[:, :, 0], positions_NRS[:, :, -1]
    expected_NR = np.vstack([np.zeros_like(first_NR[:1]), last_NR[:-1] + 1])
    wrong = np.argwhere((first_NR > 0) & (first_NR != expected_NR))
    if len(wrong):
        step, row = wrong[0]
        raise InputError(
            "`input_file` must be the packs of one --split_sequences, from the first on. Received: pack "
            f"{step * num_rows + row}, which goes on at position {first_NR[step, row]}, not "
            f"{expected_NR[step, row]}."
        )
    if not (first_NR > 0).any():
        raise InputError(
            f"`num_packs` must be at least {2 * num_rows} for packs of {num_rows} rows, and reach a pack in "
            f"which a sequence goes on. Received: {num_steps * num_rows} packs without."
        )
    return packs


def audit(model, packs, tolerance=1e-5, compile=compiled):
    """Run every check on packs of rows: list of `Check`.

    Args:
        model: Of `build_model(..., num_rows=R)`; what it carries is overwritten.
        packs: Of `take_rows`.
        tolerance: Of the check against rows that were never cut.
        compile: As in `contamination.audit`.
    """
    step = compile(functools.partial(_step, model), model)
    run = functools.partial(_run, model, step)
    vocab_size = model.config.vocab_size
    before_NRSD = run(packs)

    def changed_by(is_changed_NRS):
        """For each token, whether a change of other tokens changes its state by a bit."""
        other_NRS = np.where(is_changed_NRS, (packs["token_ids"] + 1) % vocab_size, packs["token_ids"])
        return run({**packs, "token_ids": other_NRS}) != before_NRSD

    num_leaks = sum(int(changed_by(one)[~one].any(axis=-1).sum()) for one in _changes(packs))
    goes_on_NR = packs["position_ids"][:, :, 0] > 0
    num_without = 0
    for parity in (0, 1):
        is_step_N = np.arange(len(goes_on_NR)) % 2 == parity
        moved_NR = changed_by(np.broadcast_to(is_step_N[:, None, None], packs["token_ids"].shape))[:, :, 0]
        num_without += int((goes_on_NR & ~is_step_N[:, None] & ~moved_NR.any(axis=-1)).sum())
    whole_NRSD = _uncut(compile(functools.partial(_encode, model), model), packs)
    largest = np.abs(before_NRSD - whole_NRSD).max() / (np.abs(whole_NRSD).max() or 1.0)
    return [
        Check("carried states: tokens that another sequence changes", float(num_leaks), 0.0),
        Check("carried states: packs that go on from nothing", float(num_without), 0.0),
        Check("carried states: hidden_states of uncut rows", float(largest), tolerance),
    ]


def _changes(packs):
    """Tokens to change, bool `[N, R, S]` each: of any two neighbours, or rows, one without the other."""
    starts_NRS = (packs["sequence_ids"] > 0) & (packs["position_ids"] == 0)
    num_steps, num_rows, length = starts_NRS.shape
    numbers_RL = np.cumsum(starts_NRS.transpose(1, 0, 2).reshape(num_rows, -1), axis=1)
    numbers_NRS = numbers_RL.reshape(num_rows, num_steps, length).transpose(1, 0, 2)
    rows_NRS = np.broadcast_to(np.arange(num_rows)[:, None], starts_NRS.shape)
    # Any two rows, and any two sequences of one, differ in a bit of their number
    bits = [
        numbers >> bit & 1
        for numbers in (numbers_NRS, rows_NRS)
        for bit in range(int(numbers.max(initial=0)).bit_length())
    ]
    return [(packs["sequence_ids"] > 0) & (one == value) for one in bits for value in (0, 1)]


def _encode(model, batch):
    return model.encode(batch, training=False)


def _step(model, batch):
    """Hidden states of a micro-batch as in training, and what the model carries after it."""
    hidden_BSD = model.encode(batch, training=True)
    # As values: under JAX a compiled function's assignments are lost
    return hidden_BSD, [ops.convert_to_tensor(one) for one in model.non_trainable_weights]


def _run(model, step, packs):
    """float32 `[N, R, S, D]`, in micro-batches of part of the rows."""
    num_steps, num_rows, length = packs["token_ids"].shape
    size = max(size for size in range(1, num_rows // 2 + 1) if num_rows % size == 0) if num_rows > 1 else 1
    batches = {name: packs[name].reshape(-1, size, length) for name in model.encoder_inputs}
    for one in model.non_trainable_weights:
        one.assign(ops.ones(one.shape))  # of the epoch before: no sequence may begin with it
    found = []
    for number in range(num_steps * num_rows // size):
        hidden_BSD, after = step({name: values[number] for name, values in batches.items()})
        for one, value in zip(model.non_trainable_weights, after, strict=True):
            one.assign(value)
        found.append(np.asarray(ops.convert_to_numpy(hidden_BSD), np.float32))
    return np.stack(found).reshape(num_steps, num_rows, length, -1)


def _uncut(forward, packs):
    """float32 `[N, R, S, D]`, each row as one long pack."""
    num_steps, num_rows, length = packs["token_ids"].shape
    rows = {name: values.transpose(1, 0, 2).reshape(num_rows, -1) for name, values in packs.items()}
    hidden_RLD = np.asarray(ops.convert_to_numpy(forward(rows)), np.float32)
    return hidden_RLD.reshape(num_rows, num_steps, length, -1).transpose(1, 0, 2, 3)
