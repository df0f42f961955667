"""Audit of anybody's model: no sequence of a pack may affect another.

The model is a function of arrays. Every token of one sequence after another is changed, and what the others
get must stay exactly as it is; then each sequence must get what it gets alone. A torch module is also asked
for gradients, since a kernel may leak backward alone. `contamination.py` audits our own models, losses
included.

Legend: B packs, S pack length, K sequences per pack, D width of embeddings.
"""

import dataclasses
import inspect
from collections.abc import Mapping

import numpy as np

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.assembly.given_columns import (
    POSITION_IDS,
    SEQUENCE_IDS,
    SEQUENCE_INDEX,
    TOKENS,
    count_positions,
)
from bert_packed.core.settings import InputError
from bert_packed.packing.arguments import WHOLE, as_array, is_number, shown

ROUNDING = 16  # units of the last place by which a sequence alone may differ in half precision
HALF_PRECISION = {"float16": 2**-10, "bfloat16": 2**-7}  # unit of the last place, relative


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


def audit_model(model, packs, inputs=None, tolerance=None):
    """Audit a model on packs, of which some must hold several sequences.

    Args:
        model: A function, a Keras model or a `torch.nn.Module`, without dropout (`model.eval()`). It returns
            a value, or a vector, for each token: an array `[B, S, ...]`, or a dict, tuple or output of
            transformers in which some are. All that begin with `[B, S]` are audited; those of exactly this
            shape only where no other does, since pooled states may have it.
        packs: Dict of arrays `[B, S]`: `input_ids`, and `sequence_ids` (above 0, each in one run of a row; 0
            is padding), as from `pack`. `position_ids` are counted where they are missing. Further columns
            `[B, S]`, such as `token_type_ids`, go along with their tokens.
        inputs: Function from such a dict to the arguments of `model`: a dict by name for a torch module,
            anything for others. It makes the attention mask, or what else the model knows packs by. None for
            the dict itself, of which a functional Keras model gets its inputs. A torch module gets the
            columns but `labels`, and `attention_mask(sequence_ids, dtype)`, as far as it has such arguments.
        tolerance: Largest difference from unpacked sequences, relative to the largest value. None for 1e-5,
            or 16 units of the last place of outputs in half precision.

    Returns:
        An `AuditReport`.

    Raises:
        ValueError: an argument breaks its rule, `packs` or the outputs have another form, no pack holds
            several sequences, or the model gives another output for the same packs.
    """
    if not callable(model):
        rule = "be a function, a Keras model or a torch.nn.Module"
        raise InputError(f"`model` must {rule}. Received: {shown(model)}.")
    if inputs is not None and not callable(inputs):
        raise InputError(f"`inputs` must be a function or None. Received: {shown(inputs)}.")
    if tolerance is not None and not (is_number(tolerance) and tolerance >= 0):
        raise InputError(f"`tolerance` must be a number from 0, or None. Received: {shown(tolerance)}.")
    packs, runs_BS = _check_packs(packs)
    call = _Model(model, inputs)
    before_BSD = call(packs)
    if not np.array_equal(before_BSD, call(packs), equal_nan=True):
        raise InputError(
            "`model` must give equal outputs for equal packs: without dropout, by deterministic kernels. "
            "Received: two outputs."
        )
    tolerance = call.tolerance if tolerance is None else tolerance
    checks = _changed_neighbours(call, packs, runs_BS, before_BSD)
    if call.embedding is not None:
        checks += _gradients_of_neighbours(call, packs, runs_BS)
    return AuditReport((*checks, _alone(call, packs, runs_BS, before_BSD, tolerance)))


class _Model:
    """A model as a function from a dict of NumPy arrays to a NumPy array `[B, S, D]`, of all its outputs."""

    def __init__(self, model, inputs):
        self._model, self._inputs = model, inputs
        self._torch, self._dtype, self.embedding, self.tolerance = None, None, None, 1e-5
        if hasattr(model, "state_dict") and hasattr(model, "parameters"):
            import torch  # the model's own

            self._torch = torch
            floats = (one for one in model.parameters() if one.is_floating_point())
            some = next(floats, torch.zeros(()))
            self._dtype, self._device = some.dtype, some.device
            try:
                self.embedding = model.get_input_embeddings()
            except (AttributeError, NotImplementedError):  # a module without token embeddings
                self.embedding = None

    def __call__(self, packs):
        if self._torch is None:
            outputs = self._model(self._inputs(packs) if self._inputs else self._inputs_by_name(packs))
        else:
            with self._torch.no_grad():
                outputs = self._run(packs)
        outputs = _of_tokens(outputs, packs)
        kinds = {str(one.dtype).rpartition(".")[2] for one in outputs} | {str(self._dtype).rpartition(".")[2]}
        for kind, eps in HALF_PRECISION.items():
            if kind in kinds:
                self.tolerance = max(self.tolerance, ROUNDING * eps)
        return np.concatenate([_to_numpy(one) for one in outputs], axis=-1)

    def differentiable(self, packs):
        """Outputs of a torch module `[B, S, D]`, and the embeddings that they can be differentiated by."""
        found = []

        def keep(module, arguments, output):
            # Outputs become leaves, which have gradients where the embeddings are frozen too
            found.append(output.detach().requires_grad_())
            return found[-1].clone()  # which a model may change in place

        hook = self.embedding.register_forward_hook(keep)
        try:
            outputs = _of_tokens(self._run(packs), packs)
        finally:
            hook.remove()
        flat = [one.reshape(*one.shape[:2], -1).float() for one in outputs]
        return self._torch.cat(flat, dim=-1), found

    def _run(self, packs):
        arguments = self._inputs(packs) if self._inputs else self._default_inputs(packs)
        if not isinstance(arguments, Mapping):
            rule = "return a dict of arguments for a torch module"
            raise InputError(f"`inputs` must {rule}. Received: {shown(arguments)}.")
        return self._model(
            **{
                name: self._torch.as_tensor(value).to(self._device) if hasattr(value, "shape") else value
                for name, value in arguments.items()
            }
        )

    def _inputs_by_name(self, packs):
        names = getattr(self._model, "input", None)
        if not isinstance(names, dict):
            return packs
        if missing := [name for name in names if name not in packs]:
            raise InputError(
                f"`inputs` must be given for a model whose inputs are not all in `packs`. "
                f"Received: {missing[0]}, which is not."
            )
        return {name: packs[name] for name in names}

    def _default_inputs(self, packs):
        taken = inspect.signature(self._model.forward).parameters
        if TOKENS not in taken:
            raise InputError(
                f"`inputs` must be given for a model whose `forward` has no argument {TOKENS}. "
                f"Received: {', '.join(taken)}."
            )
        arguments = {name: values for name, values in packs.items() if name in taken and name != "labels"}
        if "attention_mask" in taken:
            ids = self._torch.as_tensor(packs[SEQUENCE_IDS])
            arguments["attention_mask"] = attention_mask(ids, self._dtype)
        return arguments


def _check_packs(packs):
    """Columns `[B, S]` of packs, and the number in its row of each token's sequence, 1.., 0 for padding."""
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
    runs_BS = np.cumsum(begins_BS & (ids_BS > 0), axis=1) * (ids_BS > 0)
    for row in range(len(ids_BS)):
        num_runs, num_ids = runs_BS[row].max(initial=0), len(np.unique(ids_BS[row][ids_BS[row] > 0]))
        if num_runs != num_ids:
            raise InputError(
                f"`packs` must have each of {SEQUENCE_IDS} in one run of a row. "
                f"Received: {shown(ids_BS[row].tolist())}."
            )
    if runs_BS.max(initial=0) < 2:
        raise InputError("`packs` must hold several sequences in one of them. Received: one at most in each.")
    if POSITION_IDS not in packs:
        packs[POSITION_IDS] = count_positions(ids_BS)
    return packs, runs_BS


def _of_tokens(outputs, packs):
    several = outputs.values() if isinstance(outputs, dict) else outputs
    several = list(several) if isinstance(outputs, dict | tuple | list) else [outputs]
    shape = packs[TOKENS].shape
    found = [one for one in several if tuple(getattr(one, "shape", ()))[:2] == shape]
    if not found:
        received = ", ".join(str(list(getattr(one, "shape", ()))) for one in several)
        raise InputError(
            f"`model` must return an array that begins with {list(shape)}, a value per token. "
            f"Received shapes: {received}."
        )
    # Pooled states `[B, D]` look like values of tokens where D = S
    return [one for one in found if len(one.shape) > 2] or found


def _to_numpy(output):
    """An output `[B, S, ...]` as floats `[B, S, D]` that hold its values, float32 at least."""
    array = as_array(output, "`model`", "return real numbers")
    # Bools and small integers have differences only as floats
    array = array.astype(np.result_type(array.dtype, np.float32))
    return array.reshape(*array.shape[:2], -1)


def _changed_neighbours(call, packs, runs_BS, before_BSD):
    """Change every token of sequence 1 of all packs, then of 2, ...; compare all other sequences."""
    ids = np.unique(packs[TOKENS][runs_BS > 0])
    if len(ids) < 2:
        raise InputError(f"`packs` must hold different {TOKENS}, to change one into another.")
    # Ids that occur are ids that the model knows
    others_BS = ids[(np.searchsorted(ids, packs[TOKENS]) + 1) % len(ids)]
    largest, unmoved = 0.0, 0
    for slot in range(1, int(runs_BS.max()) + 1):
        mine_BS = runs_BS == slot
        after_BSD = call({**packs, TOKENS: np.where(mine_BS, others_BS, packs[TOKENS])})
        theirs_BS = ~mine_BS & (runs_BS > 0)
        if theirs_BS.any():
            largest = largest_of(largest, np.abs(after_BSD - before_BSD)[theirs_BS].max())
        unmoved += int((mine_BS & ~(after_BSD != before_BSD).any(axis=-1)).sum())
    return [
        Check("neighbors: change of outputs", largest, 0.0),
        # A model that ignores its input would pass everything else
        Check("changed tokens whose own output stays", float(unmoved), 0.0),
    ]


def _gradients_of_neighbours(call, packs, runs_BS):
    """Gradient of the outputs of sequence 1, then of 2, ..., on the embeddings of all other tokens."""
    import torch

    with torch.enable_grad():
        outputs_BSD, embedded = call.differentiable(packs)
        if not embedded or not outputs_BSD.requires_grad:  # `inputs` gives embeddings, or none reach the end
            return []
        # The sum is weighted, since layer norm makes a plain sum of outputs constant
        weights_D = torch.linspace(-1, 1, outputs_BSD.shape[-1], device=outputs_BSD.device)
        weights_D = weights_D if len(weights_D) > 1 else torch.ones_like(weights_D)

        def size_of(slot):
            is_mine = torch.as_tensor(runs_BS == slot, device=outputs_BSD.device)[..., None]
            target = (outputs_BSD * weights_D * is_mine).sum()
            (gradient_BSD,) = torch.autograd.grad(target, embedded[0], retain_graph=True)
            return gradient_BSD.float().abs().amax(-1).cpu().numpy()

        return check_gradients(size_of, runs_BS, runs_BS > 0)


def check_gradients(size_of, sequences_BS, is_counted_BS=True):
    """Checks of the gradient of sequence 1 of all packs, then of 2, ..., on the tokens of all others.

    `size_of` is a function from the number of a sequence to the size of its gradient on each token, `[B, S]`;
    `is_counted_BS` are tokens on which there must be no gradient but that of their own sequence.
    """
    largest, without = 0.0, 0
    for slot in range(1, int(sequences_BS.max()) + 1):
        mine_BS, size_BS = sequences_BS == slot, size_of(slot)
        largest = largest_of(largest, size_BS[~mine_BS & is_counted_BS].max(initial=0.0))
        without += int((size_BS[mine_BS] == 0).sum())
    return [
        Check("neighbors: gradient on their embeddings", largest, 0.0),
        Check("tokens without a gradient of their own", float(without), 0.0),
    ]


def _alone(call, packs, runs_BS, before_BSD, tolerance):
    """Compare every sequence's outputs with those that it has alone in a row."""
    size = len(runs_BS)
    places = [(row, slot) for row in range(size) for slot in range(1, int(runs_BS[row].max()) + 1)]
    start_position = packs[POSITION_IDS][places[0][0], 0]  # not 0 in a RoBERTa
    largest, scale = 0.0, 0.0
    for start in range(0, len(places), size):
        part = places[start : start + size]
        part += [part[-1]] * (size - len(part))  # a compiled model has one shape
        rows = {name: np.zeros_like(values) for name, values in packs.items()}
        for new, (row, slot) in enumerate(part):
            mine = np.flatnonzero(runs_BS[row] == slot)
            for name in rows:
                rows[name][new, : len(mine)] = packs[name][row, mine]
            rows[SEQUENCE_IDS][new, : len(mine)] = 1
            rows[POSITION_IDS][new, : len(mine)] = start_position + np.arange(len(mine))
        alone_BSD = call(rows)
        for new, (row, slot) in enumerate(part):
            mine = np.flatnonzero(runs_BS[row] == slot)
            largest = largest_of(largest, np.abs(before_BSD[row, mine] - alone_BSD[new, : len(mine)]).max())
            scale = largest_of(scale, np.abs(alone_BSD[new, : len(mine)]).max())
    return Check("unpacked: outputs", largest / (scale or 1.0), tolerance)


def largest_of(one, other):
    # Python's `max` may drop a NaN, which this keeps
    return float(np.maximum(one, other))
