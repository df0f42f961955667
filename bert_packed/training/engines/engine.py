"""The base of both backends' engines: their interface, names of variables, clipping, packs by replica."""

from keras import ops

FIGURES = ("gradient_norm", "is_skipped")


class Engine:
    """Compiled train and evaluation steps of a Keras model.

    A step takes the packs of all replicas together: one denominator, one clipping of the whole gradient, one
    update. A loss or a gradient that is not finite leaves weights and moments as they were.

    Args:
        model: `modeling.PackedModel`, or a Keras model called as one is; made in `replicas.scope()`.
        objective: `objectives.Objective`: what is learnt.
        optimizer: Keras optimizer, made there too; None for evaluation only. Its `global_clipnorm` becomes
            the engine's `max_grad_norm`. Several replicas need a `MomentOptimizer`.
        micro_batch_size: M, packs computed at once, by all replicas together; None for the whole batch.
        replicas: `parallel.Replicas`; None for one device.
    """

    def __init__(self, model, objective, optimizer=None, micro_batch_size=None, replicas=None):
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.replicas = replicas
        self.max_grad_norm = None
        self._micro_batch_size = micro_batch_size
        if optimizer is not None:
            # Keras would clip what each replica has by itself, and again what is clipped here
            self.max_grad_norm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
            optimizer.build(model.trainable_variables)

    @property
    def num_train_traces(self):
        """How often the training step was traced, and so compiled: 1 in a healthy run."""
        raise NotImplementedError

    def train_step(self, batch, wants_stop=False):
        """Take one optimizer step.

        Args:
            batch: Dict of arrays `[B, ...]`, with several processes this one's part of them; M must divide
                the whole.
            wants_stop: Whether this process asks all to stop; only with replicas.

        Returns:
            Dict of float32 scalars: the sums over the batch, before the update, `FIGURES`, and of LAMB
            `optimization.trust_ratios`; with replicas `num_stop_requests` too, the same everywhere.

        Raises:
            MemoryError: the device has too little memory for a micro-batch. Under JAX the engine is then
                spent: its weights went into the step.
        """
        raise NotImplementedError

    def eval_step(self, batch):
        """The sums over a batch, without dropout and without an update; raises `MemoryError`."""
        raise NotImplementedError

    def gradients(self, batch, training=True):
        """Normalised gradients and sums of a batch, one per trainable variable; without replicas."""
        raise NotImplementedError

    def step_programs(self, batch):
        """What a training step on such a batch is compiled to, now: list of one `StepProgram`."""
        raise NotImplementedError

    def weights(self):
        """The model's weights by path below the model: dict of Keras variables."""
        return named_weights(self.model)

    def training_state(self):
        """What a resumed run needs besides weights, by path: dict of Keras variables.

        They are the optimizer's, dropout seeds, and states carried from pack to pack.
        """
        weights = {id(weight) for weight in self.model.weights}
        seeds = [variable for variable in self.model.variables if id(variable) not in weights]
        # By order: Keras numbers seed generators by how many the process has made, in other models too
        state = {f"dropout_seed/{number}": seed for number, seed in enumerate(seeds)}
        carried = {_path_below(self.model, v): v for v in self.model.non_trainable_weights}
        return {**state, **carried, **{variable.path: variable for variable in self.optimizer.variables}}

    def to_save(self, keeps=True):
        """An object whose `weights()` and `training_state()` this process can read, for a checkpoint.

        All processes call it together: arrays on devices of others are fetched one after another.

        Args:
            keeps: Whether this process is going to read it.
        """
        return self

    def _packs_at_once(self, num_packs, num_sharing=None):
        """Packs of a micro-batch for one of those that share a step, each of which has `num_packs` of it.

        Args:
            num_sharing: How many they are; None for the replicas.
        """
        if not self._micro_batch_size:
            return num_packs
        return self._micro_batch_size // (num_sharing or (self.replicas.num if self.replicas else 1))

    def _by_replica(self, batch, in_parts):
        """The packs of this process by replica: dict of arrays `[local replicas, packs of one, ...]`.

        Args:
            batch: Dict of arrays, this process's packs.
            in_parts: Whether they are computed in micro-batches, as training does, or all at once.
        """
        at_once = len(next(iter(batch.values())))
        if in_parts:
            num_local = self.replicas.num_local
            at_once = self._packs_at_once(at_once // num_local) * num_local
        return {name: self.replicas.by_replica(values, at_once) for name, values in batch.items()}


def named_weights(model):
    """A model's weights by path below the model: dict of Keras variables.

    States carried from pack to pack are not among them: they belong to a run, not to a model.
    """
    return {_path_below(model, weight): weight for weight in model.trainable_weights}


def _path_below(model, variable):
    return variable.path.removeprefix(model.name + "/")


def clip(gradients, sums, max_grad_norm):
    """Clip the gradient of a step, and make it all NaN where the step must not count.

    Args:
        gradients: List of tensors, of the whole step.
        sums: Dict of scalars, of the whole step.
        max_grad_norm: The longest gradient; None for any.

    Returns:
        (gradients, dict of float32 scalars `FIGURES`): the length before clipping, and 1 where a sum or the
        length is not finite. NaN leaves a variable of a `MomentOptimizer` as it was.
    """
    norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
    is_finite = ops.isfinite(norm + sum(sums.values()))
    scale = 1.0 if max_grad_norm is None else max_grad_norm / ops.maximum(norm, max_grad_norm)
    scale = ops.where(is_finite, scale, float("nan"))
    figures = {"gradient_norm": norm, "is_skipped": 1.0 - ops.cast(is_finite, "float32")}
    return [gradient * scale for gradient in gradients], figures


def num_used_micro_batches(sequence_ids_AMS):
    """Micro-batches up to the last that holds a sequence: int32 scalar; A micro-batches of M packs."""
    is_used_A = ops.any(sequence_ids_AMS > 0, axis=(1, 2))
    numbers_A = ops.arange(1, is_used_A.shape[0] + 1, dtype="int32")
    return ops.max(numbers_A * ops.cast(is_used_A, "int32"))
