"""One training step as one XLA program on JAX: forward, loss, accumulation, update.

The values of Keras variables are its first argument, donated. From step to step they stay a tree of arrays on
the device, and are assigned back where somebody reads the variables. Each copy
of the model computes the gradients of its packs (`JaxGradients`); they are added up once, after all
micro-batches. A copy is on one device, or on several over which a layout spreads it; XLA then partitions the
program.
"""

import math

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from bert_packed.parallel.mesh_layout import Snapshot, SpreadVariable, spread
from bert_packed.parallel.replicas import AXIS
from bert_packed.training.backend import out_of_memory_names
from bert_packed.training.engines.engine import TRAINING, clip
from bert_packed.training.engines.jax_gradients import SAME, JaxGradients
from bert_packed.training.optimization import MomentOptimizer, trust_ratios
from bert_packed.training.step_report import jax_program


class JaxEngine(JaxGradients):
    """See `Engine`."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        model, optimizer = self.model, self.optimizer
        self.num_train_traces = 0
        self._state = None  # the values after the last step, until `write_back`
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
        places = None if self.replicas is None else self._places()
        self.compiled_train_step = jax.jit(
            self._train_step, donate_argnums=0, out_shardings=places, compiler_options=options
        )
        self.compiled_eval_step = jax.jit(self._eval_step, compiler_options=options)
        self._compiled_gradients = jax.jit(
            self._normalised_gradients, static_argnames="training", compiler_options=options
        )

    def start_step(self, batch, wants_stop=False):
        with out_of_memory_names(*TRAINING):
            self._state, sums = self.compiled_train_step(*self.step_arguments(batch, wants_stop))
        for value in sums.values():  # in one go with the step, not one by one when they are read
            value.copy_to_host_async()
        return sums

    def write_back(self):
        if self._state:
            for kind, variables in self._variables().items():
                _assign(variables, self._state[kind])
            self._state = None

    def step_arguments(self, batch, wants_stop=False):
        """Arguments of `compiled_train_step` for a batch of `start_step`."""
        return self.state(), self._place(batch), *self._stop_requests(wants_stop)

    def step_program(self, batch):
        return jax_program(self.compiled_train_step.lower(*self.abstract_arguments(batch)))

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
        self.write_back()  # or it would undo the seeds that are assigned below
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
        return self._state or {
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
        """Variables by name, as checkpoints hold them, with the values after the last step."""
        self.write_back()
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

    def _places(self):
        """Shardings of the state after a step, those before it, and of sums, which every device has."""
        mesh = self.replicas.mesh
        state = {
            kind: [NamedSharding(mesh, self._spec(variable)) for variable in variables]
            for kind, variables in self._variables().items()
        }
        return state, NamedSharding(mesh, SAME)

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
        self.num_train_traces += 1
        gradients, sums, other = self._normalised_gradients(
            state["trainable"], state["other"], batch, training=True
        )
        # CPUs and TPUs have nothing to gain: their runs keep the norm of earlier ones, bit for bit
        joins = self.target.platform == "gpu" and self._layout is None
        gradients, figures = clip(gradients, sums, self.max_grad_norm, joins)
        trainable, optimizer = self.optimizer.stateless_apply(
            state["optimizer"], gradients, state["trainable"]
        )
        figures |= trust_ratios(self.optimizer)
        if stop_requests is not None:
            figures["num_stop_requests"] = jnp.sum(stop_requests)
        state = {"trainable": trainable, "other": other, "optimizer": optimizer}
        return state, {**sums, **figures}

    def _eval_step(self, state, batch):
        def part(trainable, other, batch):
            outputs, _ = self._call(trainable, other, batch, training=False)
            return self.objective.sums(outputs, batch)

        if self.replicas is None:
            return part(state["trainable"], state["other"], batch)

        def summed(*arguments):
            return self._add_copies(part(*arguments))

        return self._on_each_copy(summed)(state["trainable"], state["other"], batch)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
