"""Audit of anybody's model: no sequence of a pack may affect another.

All tokens of half of the sequences are changed, and what the others get must stay exactly as it is; then each
sequence must get what it gets where the model runs on it alone. A torch module is also asked for gradients,
since a kernel may leak backward alone. `contamination.py` audits our own models, losses included.

Legend: B packs, S pack length, K sequences per pack, D width of an output, n tokens of a sequence.
"""

import contextlib
import dataclasses
from collections.abc import Mapping

import numpy as np

from bert_packed.assembly.given_columns import (
    POSITION_IDS,
    SEQUENCE_IDS,
    SEQUENCE_INDEX,
    TOKENS,
    count_positions,
)
from bert_packed.core.settings import InputError
from bert_packed.evaluation.audited_model import AuditedModel, as_floats
from bert_packed.packing.arguments import WHOLE, as_array, is_number, shown


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of an audit."""

    name: str
    largest: float  # difference, or a count; relative to the largest value against unpacked sequences
    tolerance: float

    @property
    def passed(self):
        # NaN does not pass
        return bool(self.largest <= self.tolerance)


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """Result of `audit_model`; as text, a line for each check."""

    checks: tuple[Check, ...]

    @property
    def passed(self):
        """True where every check passed."""
        return all(check.passed for check in self.checks)

    def __str__(self):
        return "\n".join(
            f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.largest:.3g}, "
            f"at most {check.tolerance:g}"
            for check in self.checks
        )


def audit_model(model, packs, inputs=None, tolerance=None, alone=None):
    """Audit a model on packs, of which some must hold several sequences.

    A torch module is audited as it is given, and again in training mode with dropout off, where that gives
    other outputs. If they then change from call to call, one check says so, and fails.

    Args:
        model: A function, a Keras model or a `torch.nn.Module`, without dropout (`model.eval()`). It returns
            a value, or a vector, for each token: an array `[B, S, ...]`, or dicts, tuples or lists in which
            some are, all of which are audited. A pooled state `[B, D]` with D = S is told by its name, or by
            an output `[B, S, D]` next to it. Models of transformers are asked for `hidden_states`.
        packs: Dict of arrays `[B, S]`: `input_ids`, and `sequence_ids` (above 0, each in one run of a row; 0
            is padding), as from `pack`. `position_ids` are counted where they are missing. Further columns
            `[B, S]`, such as `token_type_ids`, go along with their tokens.
        inputs: `PackingCollator`, or a function from such a dict to the arguments of `model`: a dict by name
            for a torch module, anything for others. It makes the attention mask, or what else the model knows
            packs by. None for the dict itself, of which a functional Keras model gets its inputs. A torch
            module gets the columns but `labels`, and `attention_mask(sequence_ids, dtype)`, as far as it has
            such arguments.
        tolerance: Largest difference from unpacked sequences, relative to the output's largest value, or the
            largest gradient. None for 1e-5, or 16 units of the last place of outputs in half precision.
        alone: Function from the columns `[1, n]` of one sequence to the arguments by which the model runs on
            it alone. None for `input_ids` and the further columns that a torch module takes, without
            positions and masks; other models get rows of `inputs` that hold one sequence, with positions
            from 0.

    Returns:
        An `AuditReport`.

    Raises:
        ValueError: an argument breaks its rule, `packs` or the outputs have another form, no pack holds
            several sequences, the model fails, or gives another output for the same packs.
    """
    if not callable(model):
        rule = "be a function, a Keras model or a torch.nn.Module"
        raise InputError(f"`model` must {rule}. Received: {shown(model)}.")
    for name, function in (("inputs", inputs), ("alone", alone)):
        if function is not None and not callable(function):
            raise InputError(f"`{name}` must be a function or None. Received: {shown(function)}.")
    if tolerance is not None and not (is_number(tolerance) and tolerance >= 0):
        raise InputError(f"`tolerance` must be a number from 0, or None. Received: {shown(tolerance)}.")
    packs, numbers_BS = _check_packs(packs)
    call = AuditedModel(model, getattr(inputs, "model_inputs", inputs), alone)
    before = call(packs)
    if not _is_equal(before, call(packs)):
        raise InputError(
            "`model` must give equal outputs for equal packs: without dropout, by deterministic kernels. "
            "Received: two outputs."
        )
    checks = _audit(call, packs, numbers_BS, before, tolerance)
    if call.torch:
        with call.training_without_dropout():
            trained, again = call(packs), call(packs)
            if not _is_equal(trained, again):
                change = float(_differences(trained, again).max())
                checks.append(Check("training mode: change from call to call", change, 0.0))
            elif not _is_equal(trained, before):
                found = _audit(call, packs, numbers_BS, trained, tolerance)
                checks += [dataclasses.replace(one, name=f"training mode: {one.name}") for one in found]
    return AuditReport(tuple(checks))


def _audit(call, packs, numbers_BS, before, tolerance):
    tolerance = call.tolerance if tolerance is None else tolerance
    checks = _changed_neighbours(call, packs, numbers_BS, before)
    if call.embedding is not None:
        checks += _gradients_of_neighbours(call, packs, numbers_BS)
    return checks + _unpacked(call, packs, numbers_BS, before, tolerance)


def _check_packs(packs):
    """Columns `[B, S]` of packs, and the number of each token's sequence in all rows, 1.., 0 for padding."""
    if not isinstance(packs, Mapping):
        raise InputError(f"`packs` must be a dict of arrays [B, S]. Received: {shown(packs)}.")
    packs = {name: as_array(values, f"`packs`: {name}", "be numbers") for name, values in packs.items()}
    if missing := [name for name in (TOKENS, SEQUENCE_IDS) if name not in packs]:
        raise InputError(f"`packs` must have {missing[0]} [B, S]. Received: {', '.join(map(str, packs))}.")
    slots = packs.pop(SEQUENCE_INDEX).shape if SEQUENCE_INDEX in packs else None
    shape = packs[TOKENS].shape
    by_token = [name for name, values in packs.items() if values.shape != slots or slots == shape]
    packs = {name: packs[name] for name in dict.fromkeys([TOKENS, SEQUENCE_IDS, *by_token])}
    for name, values in packs.items():
        if values.shape != shape or values.ndim != 2:
            raise InputError(
                f"every column of `packs` must have the shape of {TOKENS}, [B, S]. "
                f"Received: {name} of {list(values.shape)}, {TOKENS} of {list(shape)}."
            )
    ids_BS = as_array(packs[SEQUENCE_IDS], f"`packs`: {SEQUENCE_IDS}", "be whole numbers", WHOLE)
    begins_BS = np.ones(shape, bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    begins_BS &= ids_BS > 0
    for row, begins in zip(ids_BS, begins_BS, strict=True):
        if begins.sum() != len(np.unique(row[row > 0])):
            raise InputError(
                f"`packs` must have each of {SEQUENCE_IDS} in one run of a row. "
                f"Received: {shown(row.tolist())}."
            )
    if begins_BS.sum(axis=1).max(initial=0) < 2:
        raise InputError("`packs` must hold several sequences in one of them. Received: one at most in each.")
    if POSITION_IDS not in packs:
        packs[POSITION_IDS] = count_positions(ids_BS)
    return packs, np.cumsum(begins_BS).reshape(shape) * (ids_BS > 0)


def _differences(one, other):
    """The largest difference of all outputs of each token, `[B, S]`; NaN where one is NaN."""
    with np.errstate(invalid="ignore"):
        parts = [np.where(a == b, 0, np.abs(a - b)).max(-1) for a, b in zip(one, other, strict=True)]
    return np.max(parts, axis=0)


def _is_equal(one, other):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def halves(numbers_BS):
    """Halves of the sequences, bool `[B, S]`: for any two of them, one half has the first alone."""
    bits = [numbers_BS - 1 >> bit & 1 for bit in range((int(numbers_BS.max()) - 1).bit_length())]
    return [(bit_BS == value) & (numbers_BS > 0) for bit_BS in bits for value in (0, 1)]


def _changed_neighbours(call, packs, numbers_BS, before):
    """Change every token of half of the sequences; compare all others."""
    ids = np.unique(packs[TOKENS][numbers_BS > 0])
    if len(ids) < 2:
        raise InputError(f"`packs` must hold different {TOKENS}, to change one into another.")
    # Ids that occur are ids that the model knows
    others_BS = ids[(np.searchsorted(ids, packs[TOKENS]) + 1) % len(ids)]
    largest, stays_BS = 0.0, np.zeros(numbers_BS.shape, bool)
    for half_BS in halves(numbers_BS):
        after = call({**packs, TOKENS: np.where(half_BS, others_BS, packs[TOKENS])})
        change_BS = _differences(after, before)
        largest = largest_of(largest, change_BS[~half_BS & (numbers_BS > 0)].max())
        stays_BS |= half_BS & (change_BS == 0)
    return [
        Check("neighbors: change of outputs", largest, 0.0),
        # A model that ignores its input would pass everything else
        Check("changed tokens whose own output stays", float(stays_BS.sum()), 0.0),
    ]


def _gradients_of_neighbours(call, packs, numbers_BS):
    """Gradient of the outputs of half of the sequences on the embeddings of all other tokens."""
    with call.torch.enable_grad(), call.embedded() as embedded:
        outputs = call.run(packs)
    if not embedded or not any(one.requires_grad for one in outputs):
        return []  # `inputs` gives embeddings, or none reach the end

    def size_of(half_BS):
        (gradient_BSD,) = call.gradients(call.sum_of(outputs, half_BS), embedded[:1])
        size_BS = gradient_BSD.abs().amax(-1).cpu().numpy()
        size_BS = size_BS if len(size_BS) == len(half_BS) else size_BS.T  # XLNet's are [S, B]
        return size_BS[:, : half_BS.shape[1]]  # Longformer's are padded

    return check_gradients(((half_BS, size_of(half_BS)) for half_BS in halves(numbers_BS)), numbers_BS > 0)


def check_gradients(sizes, is_counted_BS=True):
    """Checks of the gradients of some tokens' outputs on the tokens of all other sequences.

    `sizes` are pairs, each `[B, S]`: whose outputs they are, bool, and the size of their gradient on each
    token. `is_counted_BS` are tokens on which there must be no gradient but that of their own sequence.
    """
    largest, without = 0.0, 0
    for mine_BS, size_BS in sizes:
        largest = largest_of(largest, size_BS[~mine_BS & is_counted_BS].max(initial=0.0))
        without = without | (mine_BS & (size_BS == 0))
    return [
        Check("neighbors: gradient on their embeddings", largest, 0.0),
        Check("tokens without a gradient of their own", float(np.sum(without)), 0.0),
    ]


def _unpacked(call, packs, numbers_BS, before, tolerance):
    """Compare outputs, and gradients of weights, with those of every sequence alone."""
    largest, scales, total = np.zeros(len(before)), np.zeros(len(before)), 0.0
    with call.torch.enable_grad() if call.torch else contextlib.nullcontext():
        for number, outputs in enumerate(call.run_each_alone(packs, numbers_BS), 1):
            if call.weights:
                total = total + call.sum_of(outputs, np.ones(outputs[0].shape[:2], bool))
            for place, (one, other) in enumerate(zip(before, map(as_floats, outputs), strict=True)):
                difference = _differences([one[numbers_BS == number]], [other[0]]).max()
                largest[place] = largest_of(largest[place], difference)
                # Logits may be minus infinity for tokens that are not to be predicted
                scales[place] = max(scales[place], np.abs(other[np.isfinite(other)]).max(initial=0.0))
        size = float(np.max(largest / np.where(scales == 0, 1, scales)))
        checks = [Check("unpacked: outputs", size, tolerance)]
        if not isinstance(total, float):
            packed = call.sum_of(call.run(packs), numbers_BS > 0)
            got, want = (call.gradients(one, call.weights) for one in (packed, total))
            # The true gradient of some, such as key biases, is 0: it has no largest one to compare with
            size = _largest_size([one - other for one, other in zip(got, want, strict=True)])
            checks.append(
                Check("unpacked: gradients of weights", size / (_largest_size(want) or 1.0), tolerance)
            )
    return checks


def _largest_size(gradients):
    return float(np.max([one.abs().max().item() for one in gradients]))


def largest_of(one, other):
    # Python's `max` may drop a NaN, which this keeps
    return float(np.maximum(one, other))
