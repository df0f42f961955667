"""Gradients of a training step on JAX, accumulated over micro-batches and added up over copies of the model.

Legend: A micro-batches per step (accumulation), M packs per micro-batch, S pack length.
"""

import jax
from jax import numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from bert_packed.layers.dropout import packs_from
from bert_packed.layers.fast_gradients import gradients_for
from bert_packed.parallel.replicas import AXIS
from bert_packed.training.backend import products_in
from bert_packed.training.engines.engine import Engine, num_used_micro_batches

SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)  # replicated; split along the first axis


class JaxGradients(Engine):
    """The part of `JaxEngine` that computes gradients: functions of the values of all variables."""

    @property
    def _layout(self):
        return self.replicas.layout if self.replicas else None

    def _call(self, trainable, other, batch, training):
        # Their gradients have the precision of products, too
        with products_in(self.model.compute_dtype, self.target.platform):
            return self.model.stateless_call(trainable, other, batch, training=training)

    def _normalised_gradients(self, trainable, other, batch, training):
        """Gradients of the step's loss, its sums, and the seeds of the next step."""
        if self.replicas is None:
            denominators = self.objective.denominators(self.objective.counts(batch))
            return self._accumulate(trainable, other, batch, denominators, training)

        def part(trainable, other, batch):
            counts = self._add_copies(self.objective.counts(batch))
            copies = self.replicas.num_copies
            _, micro = self._sizes(batch)
            copy = jax.lax.axis_index(AXIS) if copies > 1 else 0
            with packs_from(copy * micro, copies * micro):
                gradients, sums, other = self._accumulate(
                    trainable, other, batch, self.objective.denominators(counts), training
                )
            return *self._add_copies((gradients, sums)), other

        return self._on_each_copy(part)(list(trainable), list(other), batch)

    def _add_copies(self, values):
        """The sum of each array over all copies of the model."""
        if self.replicas.num_copies == 1:
            return values
        if self.target.platform != "cpu" or self._layout:
            return jax.lax.psum(values, AXIS)
        # Processors exchange one array after another, each with round trips of its own; others all at once
        flat, restore = ravel_pytree(values)
        return restore(jax.lax.psum(flat, AXIS))

    def _on_each_copy(self, function):
        """A function of weights, seeds and packs, mapped over the copies of the model."""
        return jax.shard_map(
            function,
            mesh=self.replicas.mesh,
            in_specs=(SAME, SAME, SPLIT),
            out_specs=SAME,
            axis_names={AXIS},  # along other axes, over which a copy is spread, arrays are whole
            check_vma=False,  # it cannot see that all copies advance seeds alike
        )

    def _accumulate(self, trainable, other, batch, denominators, training):
        """Gradients of the step's loss, accumulated over micro-batches by a loop inside the program.

        4 packs with M = 2 run as `[[p0 p1], [p2 p3]]`. Dropout's seeds go from part to part.
        """
        trainable = list(trainable)
        # A layout has its own matrix products, and XLA partitions the operations between them
        with gradients_for(self.target.platform if self._layout is None else ""):
            if self.objective.vectors is not None:
                return self._accumulate_by_vectors(trainable, other, batch, denominators, training)

            # Each part is divided by the whole step's denominators, so parts add up to the gradient of all at
            # once
            def add(_, part, totals, other):
                gradients, sums = totals
                new_gradients, new_sums, other = self._micro_batch(
                    trainable, other, part, denominators, training
                )
                return (_added(gradients, new_gradients), _added(sums, new_sums)), other

            if self._has_one_part(batch):
                return self._micro_batch(trainable, other, batch, denominators, training)
            no_sums = {name: jnp.zeros(()) for name in self.objective.sum_names}
            (gradients, sums), other = self._fold(batch, add, (_zeros(trainable), no_sums), other)
            return gradients, sums, other

    def _accumulate_by_vectors(self, trainable, other, batch, denominators, training):
        """The same for a loss that compares the vectors of all sequences of the step: two passes (GradCache,
        "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", Gao et al. 2021).

        The first computes the vectors, the second the gradient of each micro-batch from that of its vectors,
        with the same seeds. A single micro-batch needs one pass.
        """

        assert self._layout is None  # whose micro-batches have another order of packs

        def encode(trainable, other, part):
            outputs, moved = self._call(trainable, other, part, training)
            return self.objective.vectors(outputs, part), list(moved)

        def pull(part, other, gradient_of):
            vectors, back, moved = jax.vjp(
                lambda values: encode(values, other, part), trainable, has_aux=True
            )
            gradient, result = gradient_of(vectors)
            return back(gradient)[0], result, moved

        if self._has_one_part(batch):
            return pull(batch, other, lambda vectors: self._gradient_of_vectors(vectors, batch, denominators))

        def find(index, part, vectors, other):
            found, other = encode(trainable, other, part)
            return jax.lax.dynamic_update_slice_in_dim(vectors, found, index * len(found), 0), other

        size, micro = self._sizes(batch)
        part = {name: values[:micro] for name, values in batch.items()}
        shape = jax.eval_shape(encode, trainable, other, part)[0].shape
        vectors, _ = self._fold(batch, find, jnp.zeros((size, *shape[1:])), other)
        of_vectors, sums = self._gradient_of_vectors(vectors, batch, denominators)

        def add(index, part, gradients, other):
            own = jax.lax.dynamic_slice_in_dim(of_vectors, index * micro, micro)
            found, _, moved = pull(part, other, lambda _: (own, None))
            return _added(gradients, found), moved

        gradients, moved = self._fold(batch, add, _zeros(trainable), other)
        return gradients, sums, moved

    def _gradient_of_vectors(self, vectors, batch, denominators):
        """Gradient of the step's loss by the vectors of this copy's packs, and its part of the sums."""
        slots, number = self.objective.slots(batch), len(vectors)
        is_shared = self.replicas is not None and self.replicas.num_copies > 1
        if is_shared:  # every copy computes the loss of all
            vectors, slots = jax.lax.all_gather((vectors, slots), AXIS, tiled=True)

        def loss(vectors):
            sums = self.objective.sums({"vectors": vectors}, slots)
            return self.objective.loss(sums, denominators), sums

        gradient, sums = jax.grad(loss, has_aux=True)(vectors)
        if is_shared:
            copy = jax.lax.axis_index(AXIS)
            gradient = jax.lax.dynamic_slice_in_dim(gradient, copy * number, number)
            sums = {name: jnp.where(copy == 0, value, 0.0) for name, value in sums.items()}
        return gradient, {**sums, **self.objective.counts(batch)}

    def _has_one_part(self, batch):
        size, micro = self._sizes(batch)
        return micro == size

    def _fold(self, batch, add, totals, other):
        """Fold the micro-batches of a batch, inside the program: (totals, seeds).

        `add(index, part, totals, seeds)` returns the next totals and seeds.
        """
        size, micro = self._sizes(batch)
        number, parts = size // micro, {name: self._in_parts(values, micro) for name, values in batch.items()}

        def step(index, state):
            return add(index, {name: values[index] for name, values in parts.items()}, *state)

        start = (totals, list(other))
        if not self.objective.skips_empty:
            return jax.lax.fori_loop(0, number, step, start)
        num_used = jnp.maximum(num_used_micro_batches(parts["sequence_ids"]), 1)
        # The constant limit lets readers of the program bound its iterations
        _, (totals, moved) = jax.lax.while_loop(
            lambda state: (state[0] < num_used) & (state[0] < number),
            lambda state: (state[0] + 1, step(*state)),
            (0, start),
        )
        # Seeds advance by the same amount whatever is skipped, and so alike on all devices
        rounds = num_used.astype("uint32")
        return totals, [old + (new - old) // rounds * number for old, new in zip(other, moved, strict=True)]

    def _in_parts(self, values, micro):
        """Packs of a copy of the model as `[A, M, ...]`, without moving them between devices.

        [[0 1 4 5] [2 3 6 7]]  ->  [[0 1 2 3] [4 5 6 7]]      two rows, two micro-batches of 4
        """
        # Each row of devices has its part of every micro-batch, in the order of `Replicas.by_replica`. A
        # plain reshape would take a micro-batch from one row
        rows = self.replicas.num // self.replicas.num_copies if self.replicas else 1
        shape = (len(values) // micro, micro, *values.shape[1:])
        if rows == 1:
            return jnp.reshape(values, shape)
        by_row = jnp.reshape(values, (rows, shape[0], micro // rows, *shape[2:]))
        parts = jnp.reshape(jnp.swapaxes(by_row, 0, 1), shape)
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, self._layout.pack_axes[1:]))

    def _micro_batch(self, trainable, other, batch, denominators, training):
        def loss(trainable):
            outputs, new_other = self._call(trainable, other, batch, training)
            sums = self.objective.sums(outputs, batch)
            return self.objective.loss(sums, denominators), (sums, list(new_other))

        gradients, (sums, new_other) = jax.grad(loss, has_aux=True)(trainable)
        return gradients, sums, new_other


def _added(totals, values):
    return jax.tree.map(jnp.add, totals, values)


def _zeros(values):
    return [jnp.zeros_like(value) for value in values]
