"""Arguments by which a model gives on packs exactly what it gives on each sequence alone, found by trying."""

import contextlib
import copy
import dataclasses
import itertools
import math

import numpy as np
import torch

from bert_packed.assembly import in_memory
from bert_packed.assembly.given_columns import POSITION_IDS, TOKENS, refuse
from bert_packed.core.settings import InputError
from bert_packed.evaluation.model_audit import AuditReport, audit_model
from bert_packed.packing.arguments import is_whole
from bert_packed.torch.model_inputs import ModelInputs

LENGTHS = (10, 5, 9, 3, 8, 4)  # of the sequences that a model is tried on
MAX_LENGTH = 600  # of a sequence
EXTRA = 8  # tokens by which one is longer than the model's window
ORDERS = {True: ("positions", "mask", "varlen"), False: ("mask", "varlen")}  # of causal models and of others


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Arguments, and what `audit_model` says of them, or why the model takes none such."""

    inputs: ModelInputs
    result: AuditReport | InputError

    @property
    def is_exact(self):
        return isinstance(self.result, AuditReport) and self.result.passed

    @property
    def failed(self):
        """The first `Check` that failed; None without one."""
        return next((one for one in getattr(self.result, "checks", ()) if not one.passed), None)

    @property
    def failure(self):
        """A line: the first check that failed, or the error; "" where it is exact."""
        if isinstance(self.result, InputError):
            return str(self.result).rstrip(".")
        return f"{self.failed.name}: {self.failed.largest:.3g}" if self.failed else ""

    @property
    def difference(self):
        """What the first check that failed has found, or the largest of all; None for an error."""
        checks = [self.failed] if self.failed else getattr(self.result, "checks", ())
        return max((one.largest for one in checks), default=None)

    def __str__(self):
        names = ("attention", "first_position", "sliding_window", "return_seq_idx")
        values = {name: getattr(self.inputs, name) for name in names}
        found = {name: value for name, value in values.items() if value or name == "first_position"}
        return ", ".join(f"{name}={value!r}" for name, value in found.items())


def find_arguments(model, is_causal=None, *, in_float32=True, **given):
    """Audit a model on random tokens under one `ModelInputs` after another; yields a `Candidate` for each.

    Args:
        model: Model of transformers, of which a copy is audited.
        is_causal: True for causal attention; None for that of the model.
        in_float32: True for a copy in float32: half precision would hide wrong arguments. False for kernels
            that have none.
        **given: Fields of `ModelInputs`, of which no other values are tried; None is no value.
    """
    config, dtype, model = model.config, model.dtype, copy.deepcopy(model).eval()
    model = model.float() if in_float32 else model
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird changes it for short inputs
        refuse("`model`", 'have attention_type="original_full"', "block_sparse, which mixes sequences")
    names = ("sliding_window", "pad_token_id", "max_position_embeddings")
    window, pad_id, limit = (getattr(config, name, None) for name in names)
    window = window if is_whole(window) else None
    limit = limit if is_whole(limit) and limit > 0 else math.inf  # XLNet's is -1
    packs = _random_packs(model, config, window, limit)
    # A position beyond the table would end a process on a GPU
    is_shifted = is_whole(pad_id) and pad_id + 1 + packs[POSITION_IDS].max() < limit
    is_causal = _is_causal(model, packs) if is_causal is None else is_causal
    is_long = window is not None and window + EXTRA > MAX_LENGTH  # no sequence here shows that it is missing
    tried = {
        # Packed convolutions and scans know sequences by `seq_idx` alone
        "return_seq_idx": (False, True) if is_causal else (False,),
        "attention": ORDERS[is_causal],
        "sliding_window": (window,) if is_long else dict.fromkeys([window, None]),
        "first_position": (0, pad_id + 1) if is_shifted else (0,),
    }
    tried |= {name: (value,) for name, value in given.items() if value is not None}
    for values in itertools.product(*tried.values()):
        found = dict(zip(tried, values, strict=True))
        if found["attention"] != "mask":
            if found["sliding_window"] and (not is_long or given.get("sliding_window")):
                continue
            found["sliding_window"] = None  # which kernels know by themselves
        elif found["return_seq_idx"] and not given.get("return_seq_idx"):
            continue
        inputs = ModelInputs(**found, is_causal=is_causal, dtype=dtype)
        with _exactly():
            try:
                result = audit_model(model, packs, inputs=dataclasses.replace(inputs, dtype=model.dtype))
            except InputError as error:
                result = error
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # of gradients: RWKV changes its states in place
                result = InputError(
                    f"`model` must be differentiable. Received: {' '.join(str(error).split())}"
                )
        yield Candidate(inputs, result)


def exact_arguments(model, is_causal, **given):
    """The first exact `Candidate`; a `ValueError` names what would be, or says that nothing is."""
    tried = []
    for one in find_arguments(model, is_causal, **given):
        if one.is_exact:
            return one
        tried.append(one)
    if all(isinstance(one.result, InputError) for one in tried):  # FlashAttention has no float32
        exact = [one for one in find_arguments(model, is_causal, in_float32=False, **given) if one.is_exact]
        if exact:
            return min(exact, key=lambda one: one.difference)
    received = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    received, name = received or f"mlm_probability={'None' if is_causal else 'a rate'}", type(model).__name__
    for right in find_arguments(model):
        if right.is_exact:
            rate = "None" if right.inputs.is_causal else "a rate"
            refuse("`PackingCollator`", f"have mlm_probability={rate}, {right} for {name}", received)
    rule = "compute each sequence of a pack as alone, under arguments of `PackingCollator`"
    # A scan that refuses `seq_idx` says which kernel it needs
    refusals = [one for one in tried if one.inputs.return_seq_idx and isinstance(one.result, InputError)]
    shown = (refusals or tried)[0]
    refuse("`model`", rule, f"{name}; with {shown}: {shown.failure}")


def _random_packs(model, config, window, limit):
    """Packs of tokens without special ones; a sequence is longer than the window, where it may be."""
    special = [
        value for name, value in vars(config).items() if name.endswith("_token_id") and value is not None
    ]
    table = getattr(model.get_input_embeddings(), "weight", None)
    if table is None:
        refuse("`model`", "have embeddings of tokens", type(model).__name__)
    ids = np.setdiff1d(np.arange(len(table)), np.hstack([[], *special]))
    longest = max(LENGTHS) if window is None else max(*LENGTHS, window + EXTRA)
    length = min(limit, MAX_LENGTH, longest + 14)
    length -= length == getattr(config, "hidden_size", None)  # pooled states would look like values of tokens
    lengths = [min(one, length - 4) for one in (longest, *LENGTHS)]
    rng = np.random.default_rng(0)
    return in_memory.pack([rng.choice(ids, one).tolist() for one in lengths], length)


def _is_causal(model, packs):
    """True where the first token does not see the second."""
    # Funnel, which pools, takes no fewer
    tokens = torch.as_tensor(packs[TOKENS][:1, :8], device=next(model.parameters()).device)
    changed = torch.cat([tokens[:, :1], tokens[:, :1], tokens[:, 2:]], dim=1)
    try:
        with _exactly(), torch.no_grad():
            one, other = (model(input_ids=ids)[0][:, 0] for ids in (tokens, changed))
    except Exception as error:  # each model has its own
        refuse("`model`", "run on `input_ids` alone", " ".join(f"{type(error).__name__}: {error}".split()))
    # Not equal by a bit, where experts compute both tokens at once
    return bool((one - other).abs().max() <= 1e-4 * one.abs().max())


@contextlib.contextmanager
def _exactly():
    """Products in float32, whatever was allowed, and torch's random numbers as before."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
