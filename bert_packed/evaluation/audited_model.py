"""Anybody's model as a function of packs: what it is given, and which of its outputs are values of tokens.

Legend: B packs, S pack length, D width of an output, n tokens of a sequence.
"""

import contextlib
import inspect
from collections.abc import Mapping

import numpy as np

from bert_packed.assembly.block_attention_mask import attention_mask
from bert_packed.assembly.given_columns import POSITION_IDS, SEQUENCE_IDS, TOKENS
from bert_packed.core.settings import InputError
from bert_packed.packing.arguments import as_array, shown

ROUNDING = 16  # units of the last place by which a sequence alone may differ in half precision
HALF_PRECISION = {"float16": 2**-10, "bfloat16": 2**-7}  # unit of the last place, relative
NOT_OF_TOKENS = ("attentions", "past_key_values")  # `[B, N, S, ...]`, in which N heads may be S


class AuditedModel:
    """A model as a function from a dict of NumPy arrays to a list of them, `[B, S, D]`: all its outputs."""

    def __init__(self, model, inputs, alone):
        self._model, self._inputs, self._alone = model, inputs, alone
        self.torch, self._dtype, self.embedding, self.tolerance = None, None, None, 1e-5
        self._names, self._is_asked, self.weights = None, False, []
        if hasattr(model, "state_dict") and hasattr(model, "parameters"):
            import torch  # the model's own

            self.torch = torch
            floats = (one for one in model.parameters() if one.is_floating_point())
            some = next(floats, torch.zeros(()))
            self._dtype, self._device = some.dtype, some.device
            self.weights = [one for one in model.parameters() if one.requires_grad and one.numel()]
            self._is_asked = hasattr(getattr(model, "config", None), "output_hidden_states")
            self._taken = inspect.signature(model.forward).parameters
            self._inputs, self._alone = inputs or self._default_inputs, alone or self._default_alone
            try:
                self.embedding = model.get_input_embeddings()
            except (AttributeError, NotImplementedError):  # a module without token embeddings
                self.embedding = None
        elif inputs is None:
            self._inputs = self._inputs_by_name

    def __call__(self, packs):
        if self.torch is None:
            return self._to_numpy(self.run(packs))
        with self.torch.no_grad():
            return self._to_numpy(self.run(packs))

    def run(self, packs):
        """The outputs of packs as the model returns them."""
        return self._run(self._inputs(packs), packs[TOKENS].shape)

    def run_each_alone(self, packs, numbers_BS):
        """Outputs `[1, n, ...]` of each sequence, as the model returns them where it is alone."""
        sequences = [
            {name: values[numbers_BS == number][None] for name, values in packs.items()}
            for number in range(1, int(numbers_BS.max()) + 1)
        ]
        if self._alone is not None:
            for columns in sequences:
                yield self._run(self._alone(columns), columns[TOKENS].shape)
            return
        size = len(numbers_BS)
        for start in range(0, len(sequences), size):
            part = sequences[start : start + size]
            lengths = [columns[TOKENS].size for columns in part]
            part += [part[-1]] * (size - len(part))  # a compiled model has one shape
            rows = {name: np.zeros_like(values) for name, values in packs.items()}
            for row, columns in enumerate(part):
                num = columns[TOKENS].size
                columns |= {SEQUENCE_IDS: 1, POSITION_IDS: np.arange(num)}
                for name, values in columns.items():
                    rows[name][row, :num] = values
            outputs = self.run(rows)
            yield from ([one[row : row + 1, :num] for one in outputs] for row, num in enumerate(lengths))

    def sum_of(self, outputs, is_counted_BS):
        """A weighted sum of the outputs of some tokens, float32; 0.0 if none can be differentiated."""
        total = 0.0
        for one in outputs:
            if getattr(one, "requires_grad", False):
                values = one[self.torch.as_tensor(is_counted_BS, device=one.device)]
                values = values.reshape(len(values), -1).float()
                # Layer norm makes a plain sum of outputs constant; no weight is 0
                weights_D = self.torch.arange(values.shape[-1], device=values.device).cos()
                total = total + (values * weights_D).sum()
        return total

    def gradients(self, total, by):
        """float32 gradients of a sum by tensors."""
        found = self.torch.autograd.grad(total, by, retain_graph=True, materialize_grads=True)
        return [one.float() for one in found]

    @contextlib.contextmanager
    def embedded(self):
        """A list of what the model looks its tokens up to, and can be differentiated by."""
        found = []

        def keep(module, arguments, output):
            states, *further = output if isinstance(output, tuple) else (output,)
            # Outputs become leaves, which have gradients where the embeddings are frozen too
            found.append(states.detach().requires_grad_())
            states = found[-1].clone()  # which a model may change in place
            return (states, *further) if isinstance(output, tuple) else states

        hook = self.embedding.register_forward_hook(keep)
        try:
            yield found
        finally:
            hook.remove()

    @contextlib.contextmanager
    def training_without_dropout(self):
        """The model as in training, but for dropout; afterwards it is as it was."""
        modules, names = list(self._model.modules()), self._names
        modes = [(one, one.training) for one in modules]
        buffers = [(one, one.clone()) for one in self._model.buffers()]  # such as running means
        # Some read the rate of their configuration in each call
        owners = [*modules, *(one.config for one in modules if hasattr(one, "config"))]
        rates = [
            (owner, name, rate)
            for owner in owners
            for name, rate in getattr(owner, "__dict__", {}).items()
            if isinstance(rate, float)
            and ("drop" in name or (name == "p" and "Dropout" in type(owner).__name__))
        ]
        try:
            self._model.train()
            self._names = None
            for owner, name, _ in rates:
                setattr(owner, name, 0.0)
            yield
        finally:
            for owner, name, rate in rates:
                setattr(owner, name, rate)
            for module, mode in modes:
                module.training = mode
            with self.torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)
            self._names = names

    def _run(self, arguments, shape):
        if self.torch is not None and not isinstance(arguments, Mapping):
            rule = "return a dict of arguments for a torch module"
            raise InputError(f"`inputs` must {rule}. Received: {shown(arguments)}.")
        try:
            if self.torch is None:
                outputs = self._model(arguments)
            else:
                asked = {"output_hidden_states": True} if self._is_asked else {}
                outputs = self._model(
                    **{
                        name: self.torch.as_tensor(value).to(self._device)
                        if hasattr(value, "shape")
                        else value
                        for name, value in (asked | dict(arguments)).items()
                    }
                )
        except Exception as error:
            received = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
            raise InputError(f"`model` must take these inputs. Received: {received}.") from error
        outputs = _flatten(outputs)
        if self._names is None:
            self._names = _names_of_tokens(outputs, shape, self._is_asked)
        found = [outputs.get(name) for name in self._names]
        if wrong := [one for one in found if tuple(getattr(one, "shape", ()))[:2] != shape]:
            received = shown(list(getattr(wrong[0], "shape", ())))
            raise InputError(f"`model` must return the same outputs for {list(shape)}. Received: {received}.")
        return found

    def _to_numpy(self, outputs):
        """Outputs as floats `[B, S, D]` that hold their values, float32 at least."""
        kinds = [str(one.dtype).rpartition(".")[2] for one in outputs] + [str(self._dtype).rpartition(".")[2]]
        eps = max(HALF_PRECISION.get(kind, 0.0) for kind in kinds)
        self.tolerance = max(self.tolerance, ROUNDING * eps)
        return [as_floats(one) for one in outputs]

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
        if TOKENS not in self._taken:
            raise InputError(
                f"`inputs` must be given for a model whose `forward` has no argument {TOKENS}. "
                f"Received: {', '.join(self._taken)}."
            )
        arguments = {name: values for name, values in packs.items() if name in self._taken}
        arguments.pop("labels", None)
        if "attention_mask" in self._taken:
            ids = self.torch.as_tensor(packs[SEQUENCE_IDS])
            arguments["attention_mask"] = attention_mask(ids, self._dtype)
        return arguments

    def _default_alone(self, columns):
        left_out = (POSITION_IDS, SEQUENCE_IDS, "labels")
        further = [name for name in columns if name in self._taken and name not in left_out]
        names = [TOKENS, *(name for name in further if not name.endswith("mask"))]
        return {name: columns[name] for name in names}


def _flatten(outputs, name=""):
    """What nested dicts, tuples and lists hold, by their names and numbers."""
    if not isinstance(outputs, Mapping | tuple | list):
        return {name: outputs}
    items = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    return {key: one for part, values in items for key, one in _flatten(values, f"{name}.{part}").items()}


def _names_of_tokens(outputs, shape, is_asked):
    """Names of the outputs that begin with `[B, S]`."""
    shapes = {name: tuple(getattr(one, "shape", ())) for name, one in outputs.items()}
    found = [name for name in shapes if shapes[name][:2] == shape]
    found = [name for name in found if not any(one in name for one in NOT_OF_TOKENS)]
    # A pooled state `[B, D]` looks like values of tokens where D = S
    is_wide = any(len(shapes[name]) > 2 and shapes[name][-1] == shape[1] for name in found)
    found = [name for name in found if len(shapes[name]) > 2 or not (is_wide or "pool" in name)]
    # Hidden states alone show nothing of a head, which may mix tokens
    if not [name for name in found if not (is_asked and name.startswith(".hidden_states"))]:
        received = ", ".join(str(list(one)) for one in shapes.values())[:200]
        raise InputError(
            f"`model` must return an array that begins with {list(shape)}, a value per token; of one with a "
            f"head for whole sequences, audit `model.base_model`. Received shapes: {received}."
        )
    return found


def as_floats(output):
    array = as_array(output, "`model`", "return real numbers")
    # Bools and small integers have differences only as floats
    array = array.astype(np.result_type(array.dtype, np.float32))
    return array.reshape(*array.shape[:2], -1)
