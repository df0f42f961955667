"""Audit of anybody's model: no sequence of a pack may affect another.

The model is a function of arrays. Every token of one sequence after another is changed, and what the others
get must stay exactly as it is; then each sequence must get what it gets alone. A torch module is also asked
for gradients, since a kernel may leak backward alone. `contamination.py` audits our own models, losses
included.

Legend: B packs, S pack length, K sequences per pack, D width of embeddings.
"""

import dataclasses
import inspect

import numpy as np

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.assembly.in_memory import POSITION_IDS, SEQUENCE_IDS, SEQUENCE_INDEX, TOKENS
from bert_packed.core.settings import InputError

OUTPUTS = ("last_hidden_state", "logits")  # names of an output a token in models of transformers


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


def audit_model(model, packs, inputs=None, tolerance=1e-5):
    """Audit a model on packs, of which some must hold several sequences.

    Args:
        model: A function, a Keras model or a `torch.nn.Module`, without dropout (`model.eval()`). It returns
            a value, or a vector, for each token: an array `[B, S, ...]`, or an output of transformers.
        packs: Dict of arrays `[B, S]`: `input_ids`, and `sequence_ids` (1..K, 0 is padding), as from `pack`.
            `position_ids` are counted where they are missing. Further columns `[B, S]`, such as
            `token_type_ids`, go along with their tokens.
        inputs: Function from such a dict to the arguments of `model`: a dict by name for a torch module,
            anything for others. It makes the attention mask, or what else the model knows packs by. None for
            the dict itself, and for a torch module for its `input_ids`, `position_ids` and
            `attention_mask(sequence_ids, dtype)`, as far as it has such arguments.
        tolerance: Largest difference from unpacked sequences, relative to the largest value.

    Returns:
        An `AuditReport`.

    Raises:
        InputError: `packs` or the outputs have another form, no pack holds several sequences, or the model
            gives another output for the same packs.
    """
    packs = _check_packs(packs)
    call = _Model(model, inputs)
    before = call(packs)
    if not np.array_equal(before, call(packs), equal_nan=True):
        raise InputError("`model` must be without dropout. Received: two outputs for the same packs.")
    checks = [*_changed_neighbours(call, packs, before), _alone(call, packs, before, tolerance)]
    if call.embedding is not None:
        checks.insert(2, _gradients_of_neighbours(call, packs))
    return AuditReport(tuple(checks))


class _Model:
    """A model as a function from a dict of NumPy arrays to a NumPy array `[B, S, ...]`."""

    def __init__(self, model, inputs):
        self._model, self._inputs = model, inputs
        self._torch, self.embedding = None, None
        if type(model).__module__ != "builtins" and hasattr(model, "state_dict"):
            import torch  # the model's own

            self._torch = torch
            if hasattr(model, "get_input_embeddings"):
                self.embedding = model.get_input_embeddings()

    def __call__(self, packs):
        if self._torch is None:
            outputs = self._model(self._inputs(packs) if self._inputs else packs)
            if hasattr(outputs, "detach"):  # of a function that calls torch
                outputs = outputs.detach().float().cpu().numpy()
            return _check_outputs(np.asarray(_tokens_of(outputs), np.float32), packs)
        with self._torch.no_grad():
            return _check_outputs(self.forward(packs).float().cpu().numpy(), packs)

    def forward(self, packs):
        """Output of a torch module: a tensor `[B, S, ...]`."""
        arguments = self._inputs(packs) if self._inputs else self._default_inputs(packs)
        device = next(self._model.parameters()).device
        tensors = {name: self._torch.as_tensor(values).to(device) for name, values in arguments.items()}
        return _tokens_of(self._model(**tensors))

    def _default_inputs(self, packs):
        taken = inspect.signature(self._model.forward).parameters
        arguments = {name: values for name, values in packs.items() if name in taken}
        if "attention_mask" in taken:
            dtype = next(self._model.parameters()).dtype
            ids = self._torch.as_tensor(packs[SEQUENCE_IDS])
            arguments["attention_mask"] = attention_mask(ids, dtype)
        return arguments


def _check_packs(packs):
    packs = {name: np.asarray(values) for name, values in packs.items() if name != SEQUENCE_INDEX}
    for name in (TOKENS, SEQUENCE_IDS):
        if name not in packs or packs[name].ndim != 2:
            raise InputError(f"`packs` must have {name} [B, S]. Received: {', '.join(packs)}.")
    shape = packs[TOKENS].shape
    packs = {name: values for name, values in packs.items() if values.shape == shape}
    if not (packs[SEQUENCE_IDS].max(axis=1, initial=0) > 1).any():
        raise InputError("`packs` must hold several sequences in one of them. Received: one in each.")
    if POSITION_IDS not in packs:
        packs[POSITION_IDS] = count_positions(packs[SEQUENCE_IDS])
    return packs


def count_positions(sequence_ids):
    """Positions from 0 in every sequence: int64 `[B, S]`.

    sequence_ids [1 1 2 2 2 0]   ->   [0 1 0 1 2 0]
    """
    places = np.arange(sequence_ids.shape[1])
    starts = np.ones(sequence_ids.shape, bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return (places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)) * (sequence_ids > 0)


def _tokens_of(outputs):
    """The output a token among those of a model."""
    for name in OUTPUTS:
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
        if isinstance(outputs, dict) and name in outputs:
            return outputs[name]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def _check_outputs(outputs, packs):
    if outputs.shape[:2] != packs[TOKENS].shape:
        raise InputError(
            f"`model` must return an array {list(packs[TOKENS].shape)} and more dimensions, a value a token. "
            f"Received shape: {list(outputs.shape)}."
        )
    return outputs.reshape(*outputs.shape[:2], -1)


def _changed_neighbours(call, packs, before):
    """Change every token of sequence 1 of all packs, then of 2, ...; compare all other sequences."""
    ids = np.unique(packs[TOKENS][packs[SEQUENCE_IDS] > 0])
    if len(ids) < 2:
        raise InputError("`packs` must hold different tokens, to change one into another.")
    largest, unmoved = 0.0, 0
    for slot in range(1, int(packs[SEQUENCE_IDS].max()) + 1):
        mine_BS = packs[SEQUENCE_IDS] == slot
        # Ids that occur are ids that the model knows
        others = ids[(np.searchsorted(ids, packs[TOKENS]) + 1) % len(ids)]
        after = call({**packs, TOKENS: np.where(mine_BS, others, packs[TOKENS])})
        theirs_BS = ~mine_BS & (packs[SEQUENCE_IDS] > 0)
        if theirs_BS.any():
            largest = _max(largest, np.abs(after - before)[theirs_BS].max())
        unmoved += int((mine_BS & ~(after != before).any(axis=-1)).sum())
    return [
        Check("neighbours: change of outputs", largest, 0.0),
        # A model that ignores its input would pass everything else
        Check("changed tokens whose own output stays", float(unmoved), 0.0),
    ]


def _gradients_of_neighbours(call, packs):
    """Gradient of the outputs of sequence 1, then of 2, ..., on the embeddings of all other tokens."""
    import torch

    largest, found = 0.0, []
    hook = call.embedding.register_forward_hook(lambda module, arguments, output: found.append(output))
    try:
        with torch.enable_grad():
            outputs = call.forward(packs)
            outputs = outputs.float().reshape(*outputs.shape[:2], -1)
            # Weighted, since layer norm makes a plain sum of outputs constant
            weights = torch.linspace(-1, 1, outputs.shape[-1], device=outputs.device)
            for slot in range(1, int(packs[SEQUENCE_IDS].max()) + 1):
                mine_BS = torch.as_tensor(packs[SEQUENCE_IDS] == slot, device=outputs.device)
                target = (outputs * weights * mine_BS[..., None]).sum()
                (gradient_BSD,) = torch.autograd.grad(target, found[0], retain_graph=True)
                theirs_BS = (packs[SEQUENCE_IDS] != slot) & (packs[SEQUENCE_IDS] > 0)
                size_BS = gradient_BSD.float().abs().amax(-1).cpu().numpy()
                largest = _max(largest, size_BS[theirs_BS].max(initial=0.0))
    finally:
        hook.remove()
    return Check("neighbours: gradient on their embeddings", largest, 0.0)


def _alone(call, packs, before, tolerance):
    """Compare every sequence's outputs with those that it has alone in a row."""
    ids_BS = packs[SEQUENCE_IDS]
    size = len(ids_BS)
    places = [(row, slot) for row in range(size) for slot in np.unique(ids_BS[row][ids_BS[row] > 0])]
    largest, scale = 0.0, 0.0
    for start in range(0, len(places), size):
        part = places[start : start + size]
        part += [part[-1]] * (size - len(part))  # a compiled model has one shape
        rows = {name: np.zeros_like(values) for name, values in packs.items()}
        for new, (row, slot) in enumerate(part):
            mine = np.flatnonzero(ids_BS[row] == slot)
            for name in rows:
                rows[name][new, : len(mine)] = packs[name][row, mine]
            rows[SEQUENCE_IDS][new, : len(mine)] = 1
            rows[POSITION_IDS][new, : len(mine)] = np.arange(len(mine))
        alone = call(rows)
        for new, (row, slot) in enumerate(part):
            mine = np.flatnonzero(ids_BS[row] == slot)
            largest = _max(largest, np.abs(before[row, mine] - alone[new, : len(mine)]).max())
            scale = _max(scale, np.abs(alone[new, : len(mine)]).max())
    return Check("unpacked: outputs", largest / (scale or 1.0), tolerance)


def _max(one, other):
    # Not Python's `max`, which would drop a NaN
    return float(np.maximum(one, other))
