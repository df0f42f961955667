"""One training step as one XLA program on JAX: forward, loss, accumulation, update.

The values of Keras variables are its first argument, donated, and are assigned back after the step. Each copy
of the model computes the gradients of its packs; they are added up once, after all micro-batches. A copy is
on one device, or on several over which a layout spreads it; XLA then partitions the program.

Legend: A micro-batches per step (accumulation), M packs per micro-batch, S pack length.
"""

import math

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from bert_packed.layers.cpu_gradients import gradients_for_cpus
from bert_packed.layers.dropout import packs_from
from bert_packed.parallel.mesh_layout import FetchedVariable, SpreadVariable, spread
from bert_packed.parallel.replicas import AXIS
from bert_packed.training.backend import out_of_memory_names, products_in
from bert_packed.training.engines.engine import Engine, clip, num_used_micro_batches
from bert_packed.training.optimization import MomentOptimizer, trust_ratios
from bert_packed.training.step_report import jax_program

SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)  # replicated; split along the first axis


class JaxEngine(Engine):
    """See `Engine`."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        model, optimizer, replicas = self.model, self.optimizer, self.replicas
        self._num_train_traces = 0
        self._layout = replicas.layout if replicas else None
        assert self._layout is None or optimizer is None or isinstance(optimizer, MomentOptimizer)
        self._weight_of_moment = {}  # by id
        if isinstance(optimizer, MomentOptimizer):
            for index, weight in enumerate(model.trainable_variables):
                self._weight_of_moment |= {id(moment): weight for moment in optimizer.moments_of(index)}
            if self._layout:
                shapes = map(self._layout.shape_of, model.trainable_variables)
                optimizer.sizes = [math.prod(shape) for shape in shapes]
        # Donated: a second copy of weights and moments would be half of the memory of a large model
        options = self.target.compiler_options
        self.compiled_train_step = jax.jit(self._train_step, donate_argnums=0, compiler_options=options)
        self.compiled_eval_step = jax.jit(self._eval_step, compiler_options=options)
        self._compiled_gradients = jax.jit(
            self._normalised_gradients, static_argnames="training", compiler_options=options
        )

    @property
    def num_train_traces(self):
        return self._num_train_traces

    def train_step(self, batch, wants_stop=False):
        with out_of_memory_names("a training step", "micro_batch_size"):
            state, sums = self.compiled_train_step(*self.step_arguments(batch, wants_stop))
            for kind, variables in self._variables().items():  # while the device computes
                _assign(variables, state[kind])
            jax.block_until_ready(sums)  # else an error of the device would show up somewhere later
        return sums

    def step_arguments(self, batch, wants_stop=False):
        """Arguments of `compiled_train_step` for a batch of `train_step`."""
        return self.state(), self._place(batch), *self._stop_requests(wants_stop)

    def step_programs(self, batch):
        return [jax_program(self.compiled_train_step.lower(*self.abstract_arguments(batch)))]

    def abstract_arguments(self, batch):
        """Shapes, dtypes and places of `step_arguments`, for variables without values and absent devices."""
        state = {
            kind: [self._abstract(variable, self._spec(variable)) for variable in variables]
            for kind, variables in self._variables().items()
        }
        packs = {name: self._abstract(values, self._packs_spec) for name, values in batch.items()}
        if self.replicas is None:
            return state, packs
        mesh = self.replicas.mesh
        requests = jax.ShapeDtypeStruct((mesh.size,), np.float32)
        return state, packs, self._abstract(requests, PartitionSpec(mesh.axis_names))

    def eval_step(self, batch):
        with out_of_memory_names("evaluation", "eval_batch_size"):
            return jax.block_until_ready(
                self.compiled_eval_step(self.state(), self._place(batch, in_parts=False))
            )

    def gradients(self, batch, training=True):
        state = self.state()
        values = state["trainable"], state["other"], self._place(batch)
        # Compiled: eagerly, JAX would compile each operation separately. Not inside another program, such as
        # the audit's, which decides on its own compilation
        is_traced = any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves(values))
        compute = self._normalised_gradients if is_traced else self._compiled_gradients
        gradients, sums, other = compute(*values, training=training)
        if training:  # without dropout no seed has moved, and who compiles this must not assign
            _assign(self.model.non_trainable_variables, other)
        return gradients, sums

    def state(self):
        """The values of all variables, the first argument of the compiled steps: dict of lists of arrays."""
        return {
            kind: [self._spread(variable) for variable in variables]
            for kind, variables in self._variables().items()
        }

    def weights(self):
        return self._whole(super().weights())

    def training_state(self):
        return self._whole(super().training_state())

    def to_save(self, keeps=True):
        if self._layout is None or len(self.replicas.mesh.local_devices) == self.replicas.mesh.size:
            return self
        return Snapshot(self, keeps)

    def _variables(self):
        return {
            "trainable": self.model.trainable_variables,
            "other": self.model.non_trainable_variables,  # the dropout seeds
            "optimizer": self.optimizer.variables if self.optimizer is not None else [],
        }

    def _spread(self, variable):
        """The value of a variable on its devices, where it already is after the first step."""
        if self.replicas is None:
            return variable.value
        return spread(variable.value, self.replicas.mesh, self._spec(variable))

    def _spec(self, variable):
        """The `PartitionSpec` of a variable; a moment has that of its weight."""
        if self._layout is None:
            return SAME
        weight = self._weight_of_moment.get(id(variable), variable)
        return self._layout.spec(weight)

    @property
    def _packs_spec(self):
        return PartitionSpec(self._layout.pack_axes if self._layout else (AXIS,))

    def _abstract(self, values, spec):
        if self.replicas is not None:
            sharding = NamedSharding(self.replicas.mesh, spec)
        else:
            sharding = SingleDeviceSharding(self.target.devices[0]) if self.target.devices else None
        return jax.ShapeDtypeStruct(tuple(values.shape), values.dtype, sharding=sharding)

    def _whole(self, variables):
        """Variables by name, as checkpoints hold them."""
        if self._layout is None:
            return variables
        return {
            name: SpreadVariable(
                variable,
                self.replicas.mesh,
                self._spec(variable),
                self._layout.shape_of(self._weight_of_moment.get(id(variable), variable)),
            )
            for name, variable in variables.items()
        }

    def _kept_in_place(self, state, sums):
        """The new state, sharded as the old one, and sums that every device has."""
        if self._layout is None:
            return state, sums
        put = jax.lax.with_sharding_constraint
        mesh = self.replicas.mesh
        state = {
            kind: [
                put(value, NamedSharding(mesh, self._spec(variable)))
                for value, variable in zip(state[kind], variables, strict=True)
            ]
            for kind, variables in self._variables().items()
        }
        return state, jax.tree.map(lambda value: put(value, NamedSharding(mesh, SAME)), sums)

    def _place(self, batch, in_parts=True):
        """The batch as arrays sharded over devices by packs."""
        if self.replicas is None:
            return batch
        sharding = NamedSharding(self.replicas.mesh, self._packs_spec)
        return {
            name: jax.make_array_from_process_local_data(sharding, np.concatenate(values))
            for name, values in self._by_replica(batch, in_parts).items()
        }

    def _stop_requests(self, wants_stop):
        if self.replicas is None:
            return ()
        mesh = self.replicas.mesh
        requests = np.zeros(len(mesh.local_devices), np.float32)
        requests[0] = wants_stop  # one device per process, so that the sum counts processes
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return (jax.make_array_from_process_local_data(sharding, requests),)

    def _train_step(self, state, batch, stop_requests=None):
        self._num_train_traces += 1
        gradients, sums, other = self._normalised_gradients(
            state["trainable"], state["other"], batch, training=True
        )
        gradients, figures = clip(gradients, sums, self.max_grad_norm)
        trainable, optimizer = self.optimizer.stateless_apply(
            state["optimizer"], gradients, state["trainable"]
        )
        figures |= trust_ratios(self.optimizer)
        if stop_requests is not None:
            figures["num_stop_requests"] = jnp.sum(stop_requests)
        state = {"trainable": trainable, "other": other, "optimizer": optimizer}
        return self._kept_in_place(state, {**sums, **figures})

    def _eval_step(self, state, batch):
        def part(trainable, other, batch):
            outputs, _ = self._call(trainable, other, batch, training=False)
            return self.objective.all_sums(outputs, batch)

        if self.replicas is None:
            return part(state["trainable"], state["other"], batch)

        def summed(*arguments):
            return self._add_copies(part(*arguments))

        return self._on_each_copy(summed)(state["trainable"], state["other"], batch)

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
            micro = self._packs_at_once(len(next(iter(batch.values()))), copies)
            copy = jax.lax.axis_index(AXIS) if copies > 1 else 0
            with packs_from(copy * micro, copies * micro):
                gradients, sums, other = self._accumulate(
                    trainable, other, batch, self.objective.denominators(counts), training
                )
            return *self._add_copies((gradients, sums)), other

        return self._on_each_copy(part)(list(trainable), list(other), batch)

    def _add_copies(self, values):
        """The sum of each array over all copies of the model."""
        return jax.lax.psum(values, AXIS) if self.replicas.num_copies > 1 else values

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
        with gradients_for_cpus(self.target.platform == "cpu" and self._layout is None):
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

    def _sizes(self, batch):
        """Packs of a copy of the model, and of its micro-batch."""
        size = next(iter(batch.values())).shape[0]
        return size, self._packs_at_once(size, self.replicas.num_copies if self.replicas else 1)

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


class Snapshot:
    """Variables of an engine in host memory; see `Engine.to_save`."""

    def __init__(self, engine, keeps):
        self._weights = _fetch(engine.weights(), keeps)
        self._training_state = _fetch(engine.training_state(), keeps)

    def weights(self):
        return self._weights

    def training_state(self):
        return self._training_state


def _fetch(variables, keeps):
    return {name: FetchedVariable(variable, keeps) for name, variable in variables.items()}


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
