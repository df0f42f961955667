"""One training step as one XLA program on JAX: forward, loss, accumulation, LAMB.

Between steps the values live in the Keras variables, as under TensorFlow; the program takes them as its first
argument and writes the new ones over the old.

Legend: A micro-batches per step (accumulation), M packs per micro-batch, S pack length.
"""

import jax
from jax import numpy as jnp

from bert_packed.training.engines.memory import out_of_memory_names
from bert_packed.training.engines.variables import named_training_state, named_weights


class JaxEngine:
    """Compiled train and evaluation steps of a Keras model on one device.

    Args:
        model: Keras model called with a batch dict, returning a dict of logits.
        sums: Function `(outputs, batch)` to a dict of float32 scalar sums, the losses among them.
        sum_names: Keys of that dict.
        normalizers: Function from the step's whole batch to the denominators of the losses, in their order.
        optimizer: Keras optimizer; None for evaluation only.
        micro_batch_size: M, packs computed at once; None for the whole batch.
        loss_names: Which of the sums are losses.
        skips_empty: Whether micro-batches at the end that hold no sequence are skipped. The program stays
            one: the number of rounds of its loop follows from the data.
    """

    def __init__(
        self,
        model,
        sums,
        sum_names,
        normalizers,
        optimizer=None,
        micro_batch_size=None,
        loss_names=("mlm_loss", "nsp_loss"),
        skips_empty=False,
    ):
        self.model = model
        self.optimizer = optimizer
        self.sums = sums
        self._sum_names = sum_names
        self._normalizers = normalizers
        self._micro_batch_size = micro_batch_size
        self._loss_names = loss_names
        self._skips_empty = skips_empty
        self._num_train_traces = 0
        if optimizer is not None:
            optimizer.build(model.trainable_variables)
        # Donated: a second copy of weights and moments would be half of the memory of a large model
        options = _compiler_options(jax.default_backend())
        self.compiled_train_step = jax.jit(self._train_step, donate_argnums=0, compiler_options=options)
        self.compiled_eval_step = jax.jit(self._eval_step)
        self._compiled_gradients = jax.jit(
            self._accumulate, static_argnames="training", compiler_options=options
        )

    @property
    def num_train_traces(self):
        """How often the training step was traced, and so compiled: 1 in a healthy run."""
        return self._num_train_traces

    def train_step(self, batch):
        """Take one optimizer step.

        Args:
            batch: Dict of arrays `[B, ...]`; M must divide B.

        Returns:
            Dict of float32 scalars: the sums over the batch, before the update.

        Raises:
            MemoryError: the device has too little memory for a micro-batch. The engine is then spent: its
                weights went into the step.
        """
        with out_of_memory_names("a training step", "micro_batch_size"):
            state, sums = self.compiled_train_step(self.state(), batch)
            jax.block_until_ready(sums)  # else an error of the device would show up somewhere later
        for kind, variables in self._variables().items():
            _assign(variables, state[kind])
        return sums

    def count_train_step(self, batch):
        """What XLA counts in a compiled training step: dict of `flops`, `bytes accessed`, `temporary bytes`.

        Compiles the step once more, for these shapes; nothing is computed. XLA counts the body of a loop
        once, so operations and bytes are of one micro-batch.
        """
        program = self.compiled_train_step.lower(self.state(), batch).compile()
        counts = program.cost_analysis()
        temporary = program.memory_analysis().temp_size_in_bytes
        return {**{name: counts[name] for name in ("flops", "bytes accessed")}, "temporary bytes": temporary}

    def eval_step(self, batch):
        """The sums over a batch, without dropout and without an update; raises `MemoryError`."""
        with out_of_memory_names("evaluation", "eval_batch_size"):
            return jax.block_until_ready(self.compiled_eval_step(self.state(), batch))

    def gradients(self, batch, training=True):
        """Normalised gradients and sums of a batch, one per trainable variable."""
        state = self.state()
        values = state["trainable"], state["other"], batch
        # Compiled: operation by operation, JAX would compile each of them by itself. Not inside another
        # program, such as the audit's, which decides on its own compilation
        is_traced = any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves(values))
        compute = self._accumulate if is_traced else self._compiled_gradients
        gradients, sums, other = compute(*values, training=training)
        if training:  # without dropout no seed has moved, and who compiles this must not assign
            _assign(self.model.non_trainable_variables, other)
        return gradients, sums

    def weights(self):
        """The model's weights by path below the model: dict of Keras variables."""
        return named_weights(self.model)

    def training_state(self):
        """What a resumed run needs besides weights, by path: optimizer and dropout seeds."""
        return named_training_state(self.model, self.optimizer)

    def state(self):
        """The values of all variables, the first argument of the compiled steps: dict of lists of arrays."""
        return {kind: [v.value for v in variables] for kind, variables in self._variables().items()}

    def _variables(self):
        return {
            "trainable": self.model.trainable_variables,
            "other": self.model.non_trainable_variables,  # the dropout seeds
            "optimizer": self.optimizer.variables if self.optimizer is not None else [],
        }

    def _train_step(self, state, batch):
        self._num_train_traces += 1
        gradients, sums, other = self._accumulate(state["trainable"], state["other"], batch, training=True)
        trainable, optimizer = self.optimizer.stateless_apply(
            state["optimizer"], gradients, state["trainable"]
        )
        return {"trainable": trainable, "other": other, "optimizer": optimizer}, sums

    def _eval_step(self, state, batch):
        outputs, _ = self.model.stateless_call(state["trainable"], state["other"], batch, training=False)
        return self.sums(outputs, batch)

    def _accumulate(self, trainable, other, batch, training):
        """Gradients of the step's loss, added up over micro-batches by a loop inside the program.

        A batch of B = 4 packs with M = 2 runs as `[[p0 p1], [p2 p3]]`; each part's loss is divided by the
        whole step's normalizers, so the parts add up to the gradient of all four at once. The seeds go from
        part to part, so that each drops other units.
        """
        normalizers = self._normalizers(batch)
        size = next(iter(batch.values())).shape[0]
        micro = self._micro_batch_size or size
        if micro == size:
            return self._micro_batch(trainable, other, batch, normalizers, training)
        parts = {
            name: jnp.reshape(values, (size // micro, micro, *values.shape[1:]))
            for name, values in batch.items()
        }

        def add_part(index, totals):
            part = {name: values[index] for name, values in parts.items()}
            gradients, sums, other = totals
            new_gradients, new_sums, other = self._micro_batch(trainable, other, part, normalizers, training)
            gradients = [total + new for total, new in zip(gradients, new_gradients, strict=True)]
            return gradients, {name: sums[name] + new_sums[name] for name in sums}, other

        zeros = [jnp.zeros_like(values) for values in trainable]
        no_sums = {name: jnp.zeros(()) for name in self._sum_names}
        num_used = _num_used(parts["sequence_ids"]) if self._skips_empty else size // micro
        return jax.lax.fori_loop(0, num_used, add_part, (zeros, no_sums, list(other)))

    def _micro_batch(self, trainable, other, batch, normalizers, training):
        def loss(trainable):
            outputs, new_other = self.model.stateless_call(trainable, other, batch, training=training)
            sums = self.sums(outputs, batch)
            losses = zip(self._loss_names, normalizers, strict=True)
            return sum(sums[name] / normalizer for name, normalizer in losses), (sums, list(new_other))

        gradients, (sums, new_other) = jax.grad(loss, has_aux=True)(list(trainable))
        return gradients, sums, new_other


def _compiler_options(platform):
    """Options of XLA that keep rematerialised blocks apart from the first computation of them: dict.

    On the CPU, XLA drops the barriers around what is computed again before it merges equal computations, and
    so keeps every activation after all. GPU and TPU drop them late enough, and cannot do without that.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if platform == "cpu" else {}


def _num_used(sequence_ids_AMS):
    """Micro-batches up to the last that holds a sequence: int32 scalar."""
    is_used_A = jnp.any(sequence_ids_AMS > 0, axis=(1, 2))
    return jnp.max(jnp.arange(1, is_used_A.shape[0] + 1) * is_used_A)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
