"""Base class of both backends' engines, gradient clipping, and names of variables in checkpoints."""

import math

from keras import ops

from bert_packed.layers.fast_gradients import barrier
from bert_packed.parallel.targets import devices_here
from bert_packed.training.backend import out_of_memory_names

FIGURES = ("gradient_norm", "is_skipped")
TRAINING = "a training step", "micro_batch_size"  # for `out_of_memory_names`
NUM_PARTS, FEW_VALUES = 1024, 4096  # of `_partial_squares`


class Engine:
    """Compiled train and evaluation steps of a Keras model.

    A step has one denominator, one clipping and one update for the packs of all replicas together. A loss or
    gradient that is not finite leaves weights and moments unchanged.

    Args:
        model: `PackedModel`, or a Keras model with the same call; made in `replicas.scope()`.
        objective: `Objective`.
        optimizer: Keras optimizer, made in that scope too; None for evaluation only. Its `global_clipnorm`
            becomes the engine's `max_grad_norm`. Several replicas need a `MomentOptimizer`.
        micro_batch_size: M, packs computed at once, by all replicas together; None for the whole batch.
        replicas: `Replicas`; None for one device.
        target: `Target` that steps are compiled for; None for the devices of this process.

    Attributes:
        num_train_traces: Number of traces, and so compilations, of the training step: 1 in a healthy run.
    """

    def __init__(self, model, objective, optimizer=None, micro_batch_size=None, replicas=None, target=None):
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.replicas = replicas
        self.target = target or devices_here()
        self.max_grad_norm = None
        self._micro_batch_size = micro_batch_size
        if optimizer is not None:
            # Keras would clip each replica's gradient separately, and clip again after us
            self.max_grad_norm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
            optimizer.build(model.trainable_variables)

    def start_step(self, batch, wants_stop=False):
        """Start one optimizer step, after the one before, without waiting for its end.

        Args:
            batch: Dict of arrays `[B, ...]`, of several processes each its own part; M must divide the whole.
            wants_stop: Request that all processes stop; only with replicas.

        Returns:
            Dict of float32 scalars, for `read`: sums over the batch before the update, `FIGURES`,
            `trust_ratios`, and with replicas `num_stop_requests`; the same in all processes.

        Raises:
            MemoryError: too little device memory for a micro-batch. Under JAX the engine is unusable
                afterwards, since its weights were donated to the step.
        """
        raise NotImplementedError

    def read(self, sums):
        """Wait for the sums of a step: dict of floats; raises `MemoryError` as `start_step`."""
        with out_of_memory_names(*TRAINING):
            return {name: float(value) for name, value in sums.items()}

    def write_back(self):
        """Give the Keras variables their values after the last step that was started."""

    def train_step(self, batch, wants_stop=False):
        """Take one step, variables included, and wait for it: the dict of floats of `read`."""
        sums = self.start_step(batch, wants_stop)
        # Before the wait: an interrupt there would leave variables whose arrays the step has consumed
        self.write_back()
        return self.read(sums)

    def eval_step(self, batch):
        """Sums over a batch, without dropout or update; raises `MemoryError`. Not for `Objective.vectors`."""
        raise NotImplementedError

    def gradients(self, batch, training=True):
        """(Normalised gradients, one per trainable variable, and sums) of a batch; without replicas."""
        raise NotImplementedError

    def step_program(self, batch):
        """Compile a training step on such a batch: `StepProgram`."""
        raise NotImplementedError

    def weights(self):
        """The model's weights by path below the model: dict of Keras variables."""
        return named_weights(self.model)

    def training_state(self):
        """Dropout seeds, states carried from pack to pack, and the optimizer's variables: dict by path."""
        weights = {id(weight) for weight in self.model.weights}
        seeds = [variable for variable in self.model.variables if id(variable) not in weights]
        # Seeds are numbered by order: Keras's numbers count the seed generators of all models of the process
        state = {f"dropout_seed/{number}": seed for number, seed in enumerate(seeds)}
        carried = {_path_below(self.model, v): v for v in self.model.non_trainable_weights}
        return {**state, **carried, **{variable.path: variable for variable in self.optimizer.variables}}

    def to_save(self, keeps=True):
        """An object with `weights()` and `training_state()` that this process can read, for a checkpoint.

        All processes call it together, to fetch arrays from each other's devices; `keeps` is False in a
        process that will not read the result.
        """
        return self

    def _sizes(self, batch):
        """Packs of a copy of the model, and of its micro-batch."""
        size = next(iter(batch.values())).shape[0]
        if not self._micro_batch_size:
            return size, size
        return size, self._micro_batch_size // (self.replicas.num_copies if self.replicas else 1)

    def _by_replica(self, batch, in_parts):
        """This process's packs as `[local replicas, packs of one, ...]`; `in_parts` for micro-batches."""
        at_once = len(next(iter(batch.values())))
        if in_parts and self._micro_batch_size:
            at_once = self._micro_batch_size // self.replicas.num * self.replicas.num_local
        return {name: self.replicas.by_replica(values, at_once) for name, values in batch.items()}


def named_weights(model):
    """A model's weights by path below the model: dict of Keras variables."""
    # Not the states carried from pack to pack, which belong to a run
    return {_path_below(model, weight): weight for weight in model.trainable_weights}


def _path_below(model, variable):
    return variable.path.removeprefix(model.name + "/")


def clip(gradients, sums, max_grad_norm, joins=False):
    """Clip the gradient of a whole step to a global norm (None for never), or make it NaN to skip the step.

    With `joins` one sum ends the norm, not one for each gradient; only in a program of XLA's, and for
    gradients that are whole on each device.

    Returns:
        (gradients, dict of float32 scalars `FIGURES`): the norm before clipping, and 1 where it or one of the
        `sums` is not finite. A `MomentOptimizer` keeps variables whose gradient is NaN.
    """
    if joins:
        # XLA would turn the sum of joined sums into sums of each again, a launch on a GPU for each
        squares = ops.sum(barrier(ops.concatenate([_partial_squares(gradient) for gradient in gradients])))
    else:
        squares = sum(ops.sum(ops.square(gradient)) for gradient in gradients)
    norm = ops.sqrt(squares)
    is_finite = ops.isfinite(norm + sum(sums.values()))
    scale = 1.0 if max_grad_norm is None else max_grad_norm / ops.maximum(norm, max_grad_norm)
    scale = ops.where(is_finite, scale, float("nan"))
    figures = {"gradient_norm": norm, "is_skipped": 1.0 - ops.cast(is_finite, "float32")}
    return [gradient * scale for gradient in gradients], figures


def _partial_squares(gradient):
    """Sums of squares of parts of a gradient, of a small one of each value: `[N]`."""
    size = math.prod(gradient.shape)
    number = size if size <= FEW_VALUES else math.gcd(size, NUM_PARTS)
    return ops.sum(ops.square(ops.reshape(gradient, (number, size // number))), axis=1)


def num_used_micro_batches(sequence_ids_AMS):
    """Number of micro-batches up to the last that holds a sequence: int32; A micro-batches of M packs."""
    is_used_A = ops.any(sequence_ids_AMS > 0, axis=(1, 2))
    numbers_A = ops.arange(1, is_used_A.shape[0] + 1, dtype="int32")
    return ops.max(numbers_A * ops.cast(is_used_A, "int32"))
