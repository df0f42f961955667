"""What the engines of both backends share, and what a step does with its gradients before the update."""

from keras import ops

from bert_packed.training.engines.variables import named_training_state, named_weights

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

    def weights(self):
        """The model's weights by path below the model: dict of Keras variables."""
        return named_weights(self.model)

    def training_state(self):
        """What a resumed run needs besides weights, by path: optimizer and dropout seeds."""
        return named_training_state(self.model, self.optimizer)

    def to_save(self, keeps=True):
        """What `weights` and `training_state` can be read of in this process, for a checkpoint.

        Every process calls it: what lies on devices of others comes to all, one array after another.

        Args:
            keeps: Whether this process is going to read it.
        """
        return self

    def _packs_at_once(self, num_packs, num_sharing=None):
        """Of those that have so many packs of the step; how many share it, None for the replicas."""
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
