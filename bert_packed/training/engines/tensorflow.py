"""One training step as one XLA program on TensorFlow: forward, loss, accumulation, update.

On several devices the program of each ends with its gradients. `tf.distribute` adds them up, and the update
follows outside the program, since `tf.distribute` allows none in a compiled one.

Legend: A micro-batches per step (accumulation), M packs per micro-batch, S pack length.
"""

import contextlib
import dataclasses
import time

import tensorflow as tf

from bert_packed.layers.dropout import packs_from
from bert_packed.layers.fast_gradients import gradients_for
from bert_packed.layers.rematerialisation import find_dropouts
from bert_packed.training.backend import out_of_memory_names, products_in
from bert_packed.training.engines.engine import TRAINING, Engine, clip, num_used_micro_batches
from bert_packed.training.optimization import trust_ratios
from bert_packed.training.step_report import StepProgram, compiled_program

SUM = tf.distribute.ReduceOp.SUM


class TensorFlowEngine(Engine):
    """See `Engine`."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        model, objective, replicas = self.model, self.objective, self.replicas
        options = {"jit_compile": True, "reduce_retracing": False, "autograph": False}
        # Layers whose seeds the engine advances
        moves_seeds = replicas is not None or objective.skips_empty or objective.vectors is not None
        self._dropouts = [layer for layer in find_dropouts(model) if layer.rate > 0] if moves_seeds else []
        if replicas is None:
            self.compiled_train_step = tf.function(self._train_step, **options)
            self.compiled_eval_step = tf.function(self._eval_step, **options)
            return
        self._compiled_part = tf.function(self._replica_gradients, **options)
        self._compiled_vectors = tf.function(self._replica_vectors, **options)
        self._compiled_pull = tf.function(self._replica_pull, **options)
        self._compiled_eval_part = tf.function(self._eval_step, **options)
        self.compiled_train_step = tf.function(
            self._shared_train_step, reduce_retracing=False, autograph=False
        )
        self.compiled_eval_step = tf.function(self._shared_eval_step, reduce_retracing=False, autograph=False)

    @property
    def num_train_traces(self):
        return self.compiled_train_step.experimental_get_tracing_count()

    def start_step(self, batch, wants_stop=False):
        with out_of_memory_names(*TRAINING):
            if self.replicas is None:
                return self.compiled_train_step(batch)
            return self.compiled_train_step(self._distribute(batch), tf.constant(float(wants_stop)))

    def step_program(self, batch):
        if self.target.devices:
            return _program_for_absent(self.target, self.compiled_train_step, batch)
        if self.replicas is None:
            return tensorflow_program(self.compiled_train_step, batch)
        # The program of one replica, which ends with its gradients: reduction and update are in no program
        part = {
            name: tf.constant(values[0]) for name, values in self._by_replica(batch, in_parts=True).items()
        }
        denominators = self.objective.denominators(self.objective.counts(part))
        program = tensorflow_program(self._compiled_part, part, denominators, tf.constant(0))
        return dataclasses.replace(program, num_devices=self.replicas.num)

    def eval_step(self, batch):
        with out_of_memory_names("evaluation", "eval_batch_size"):
            if self.replicas is None:
                return self.compiled_eval_step(batch)
            return self.compiled_eval_step(self._distribute(batch, in_parts=False))

    def gradients(self, batch, training=True):
        denominators = self.objective.denominators(self.objective.counts(batch))
        return self._accumulate(batch, denominators, training)

    def _train_step(self, batch):
        with gradients_for(self.target.platform):
            gradients, sums = self.gradients(batch)
        gradients, figures = clip(gradients, sums, self.max_grad_norm)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return {**sums, **figures, **trust_ratios(self.optimizer)}

    def _eval_step(self, batch):
        with products_in(self.model.compute_dtype, self.target.platform):
            return self.objective.sums(self.model(batch, training=False), batch)

    def _distribute(self, batch, in_parts=True):
        """The packs of this process as per-replica values of `tf.distribute`."""
        by_replica = self._by_replica(batch, in_parts)

        def part(context):
            number = context.replica_id_in_sync_group % self.replicas.num_local
            return {name: tf.constant(values[number]) for name, values in by_replica.items()}

        return self.replicas.strategy.experimental_distribute_values_from_function(part)

    def _shared_train_step(self, batch, wants_stop):
        strategy = self.replicas.strategy
        sums = strategy.run(self._replica_step, args=(batch, wants_stop))
        some = next(iter(batch.values()))
        size, micro = self._sizes({"some": strategy.experimental_local_results(some)[0]})
        self._move_seeds(size // micro)
        sums = {name: strategy.experimental_local_results(value)[0] for name, value in sums.items()}
        # Not in each replica: there is one update, whose ratios can be read once
        return {**sums, **trust_ratios(self.optimizer)}

    def _move_seeds(self, num_rounds):
        """Advance the seeds of dropout, as `num_rounds` micro-batches do."""
        for layer in self._dropouts:
            seed = layer.seed_generator.state
            seed.assign(seed.value + tf.cast(tf.stack([0, num_rounds]), seed.value.dtype))

    def _replica_step(self, batch, wants_stop):
        context = tf.distribute.get_replica_context()
        denominators = self.objective.denominators(context.all_reduce(SUM, self.objective.counts(batch)))
        number = context.replica_id_in_sync_group
        if self.objective.vectors is None:
            gradients, sums = self._compiled_part(batch, denominators, number)
        else:
            gathered = self._gathered(batch, number, context)
            gradients, sums = self._compiled_pull(batch, denominators, number, gathered)
        # One replica per process, so that the sum counts processes
        asks = wants_stop * tf.cast(number % self.replicas.num_local == 0, tf.float32)
        gradients, sums, num_asked = context.all_reduce(SUM, (gradients, sums, asks))
        gradients, figures = clip(gradients, sums, self.max_grad_norm)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return {**sums, **figures, "num_stop_requests": num_asked}

    def _replica_gradients(self, batch, denominators, number):
        with gradients_for(self.target.platform):
            return self._accumulate(batch, denominators, True, number)

    def _replica_pull(self, batch, denominators, number, gathered):
        with gradients_for(self.target.platform):
            size, _ = self._sizes(batch)
            of_vectors, sums = self._gradient_of_vectors(*gathered, denominators)
            first = number * size
            of_vectors = of_vectors[first : first + size]
            # All replicas have computed the loss of all
            sums = {name: tf.where(number == 0, value, 0.0) for name, value in sums.items()}
            gradients = self._pull_all(batch, of_vectors, True, number)
            return gradients, {**sums, **self.objective.counts(batch)}

    def _replica_vectors(self, batch, number):
        return self._vectors(batch, True, number)

    def _gathered(self, batch, number, context):
        """Vectors and `[B, K]` arrays of the packs of all replicas."""

        def gather(values):
            shape = (values.shape[0] * self.replicas.num, *values.shape[1:])
            return tf.ensure_shape(context.all_gather(values, axis=0), shape)

        mine = self._compiled_vectors(batch, number), self.objective.slots(batch)
        return tf.nest.map_structure(gather, mine)

    def _shared_eval_step(self, batch):
        def step(batch):
            sums = self._compiled_eval_part(batch)
            return tf.distribute.get_replica_context().all_reduce(SUM, sums)

        strategy = self.replicas.strategy
        sums = strategy.run(step, args=(batch,))
        return {name: strategy.experimental_local_results(value)[0] for name, value in sums.items()}

    def _accumulate(self, batch, denominators, training, replica=None):
        """Gradients of the step's loss, accumulated over micro-batches by a loop inside the program.

        4 packs with M = 2 run as `[[p0 p1], [p2 p3]]`. The denominators are those of the whole step, on all
        replicas; `replica` is the index of this one, int32, or None for one device.
        """
        size, micro = self._sizes(batch)
        num_parts = size // micro
        if self.objective.vectors is not None:
            return self._accumulate_by_vectors(batch, denominators, training, num_parts)
        if micro == size:
            return self._micro_batch(batch, denominators, training, replica, 0)

        def add(index, part, totals):
            new = self._micro_batch(part, denominators, training, replica, index)
            return tf.nest.map_structure(tf.add, totals, new)

        zeros = self._zeros(), dict.fromkeys(self.objective.sum_names, tf.zeros(()))
        gradients, sums = self._fold(batch, add, zeros)
        if self.objective.skips_empty and training and replica is None:
            # Seeds advance by the same amount whatever is skipped, as on several devices
            self._move_seeds(num_parts - self._num_used(batch))
        return gradients, sums

    def _zeros(self):
        return [tf.zeros(variable.shape) for variable in self.model.trainable_variables]

    def _num_used(self, batch):
        """Number of micro-batches to compute: int, or int32 where empty ones are skipped."""
        size, micro = self._sizes(batch)
        if not self.objective.skips_empty:
            return size // micro
        return num_used_micro_batches(tf.reshape(batch["sequence_ids"], (size // micro, micro, -1)))

    def _fold(self, batch, add, totals):
        """Fold the micro-batches, inside the program: `add(index, part, totals)` returns the next totals."""
        size, micro = self._sizes(batch)
        parts = {
            name: tf.reshape(values, (size // micro, micro, *values.shape[1:]))
            for name, values in batch.items()
        }
        num_used = self._num_used(batch)

        def step(index, totals):
            return index + 1, add(index, {name: values[index] for name, values in parts.items()}, totals)

        _, totals = tf.while_loop(
            lambda index, _: index < num_used, step, (0, totals), maximum_iterations=size // micro
        )
        return totals

    def _accumulate_by_vectors(self, batch, denominators, training, num_parts):
        """Two passes on one device, as in the engine of JAX; the second has the first one's seeds."""

        def of_step(vectors):
            return self._gradient_of_vectors(vectors, self.objective.slots(batch), denominators)

        if num_parts == 1:
            gradients, sums = self._pull(batch, training, 0, 0, of_step)
        else:
            of_vectors, sums = of_step(self._vectors(batch, training, 0))
            gradients = self._pull_all(batch, of_vectors, training, 0)
        if training:
            self._move_seeds(num_parts)
        return gradients, {**sums, **self.objective.counts(batch)}

    def _vectors(self, batch, training, replica):
        """First pass: the vectors of all packs of a replica, float32 `[B, K, D]`."""
        size, micro = self._sizes(batch)

        def find(index, part, vectors):
            return vectors.write(index, self._encode(part, training, replica, index))

        # Unused micro-batches keep zeros
        if micro == size:
            return self._encode(batch, training, replica, 0)
        slots = batch["slot_weights"].shape[1]
        shape = (micro, slots, self.model.config.hidden_size)
        vectors = tf.TensorArray(tf.float32, size // micro, element_shape=shape, clear_after_read=False)
        vectors = self._fold(batch, find, vectors.unstack(tf.zeros((size // micro, *shape))))
        return tf.reshape(vectors.stack(), (size, *shape[1:]))

    def _pull_all(self, batch, of_vectors, training, replica):
        """Second pass: gradients of the weights from those of the vectors."""
        _, micro = self._sizes(batch)

        def add(index, part, gradients):
            own = tf.slice(of_vectors, (index * micro, 0, 0), (micro, *of_vectors.shape[1:]))
            new, _ = self._pull(part, training, replica, index, lambda _: (own, None))
            return [total + more for total, more in zip(gradients, new, strict=True)]

        return self._fold(batch, add, self._zeros())

    def _pull(self, part, training, replica, index, gradient_of):
        """Gradients of the weights; `gradient_of(vectors)` returns that of the vectors, and a result."""
        with tf.GradientTape() as tape:
            vectors = self._encode(part, training, replica, index)
            values = [v.value for v in self.model.trainable_variables]
        of_vectors, result = gradient_of(vectors)
        found = tape.gradient(vectors, values, of_vectors)
        return [tf.convert_to_tensor(gradient) for gradient in found], result

    def _encode(self, batch, training, replica, index):
        with self._as_one_device(batch, replica, index):
            return self.objective.vectors(self.model(batch, training=training), batch)

    def _gradient_of_vectors(self, vectors, slots, denominators):
        """Gradient of the step's loss by the vectors of all packs, and the sums."""
        with tf.GradientTape() as tape:
            tape.watch(vectors)
            sums = self.objective.sums({"vectors": vectors}, slots)
            loss = self.objective.loss(sums, denominators)
        return tape.gradient(loss, vectors), sums

    def _micro_batch(self, batch, denominators, training, replica, index):
        with self._as_one_device(batch, replica, index), tf.GradientTape() as tape:
            sums = self.objective.sums(self.model(batch, training=training), batch)
            loss = self.objective.loss(sums, denominators)
            gradients = tape.gradient(loss, [v.value for v in self.model.trainable_variables])
        # Embedding look-ups give sparse gradients, which a loop cannot carry
        return [tf.convert_to_tensor(gradient) for gradient in gradients], sums

    @contextlib.contextmanager
    def _as_one_device(self, batch, replica, index):
        """Products of the model's dtype; dropout of a replica's micro-batch `index` as on one device."""
        with products_in(self.model.compute_dtype, self.target.platform):
            if replica is None:
                yield
                return
            # The seeds themselves cannot advance here: `tf.distribute` lets no replica write shared variables
            for layer in self._dropouts:
                state = layer.seed_generator.state.value
                layer.given_seed = state + tf.cast(tf.stack([0, index]), state.dtype)
            size = next(iter(batch.values())).shape[0]
            try:
                with packs_from(replica * size, (self.replicas.num if self.replicas else 1) * size):
                    yield
            finally:
                for layer in self._dropouts:
                    layer.given_seed = None


def tensorflow_program(function, *arguments):
    """Compile a `tf.function(..., jit_compile=True)`: `StepProgram`, with unknown FLOPs and bytes."""
    # It is private, but in the wheels of 2.18 to 2.21; no public package has XLA's schema
    from tensorflow.compiler.xla.service.hlo_pb2 import HloProto

    # The step is compiled twice: text and memory need two calls
    compiler_ir = function.experimental_get_compiler_ir(*arguments)
    start = time.perf_counter()
    text = compiler_ir(stage="optimized_hlo")
    seconds = time.perf_counter() - start
    proto = HloProto.FromString(compiler_ir(stage="optimized_hlo_proto_serialized"))
    return StepProgram(text, seconds, **buffer_sizes(proto.buffer_assignment))


def buffer_sizes(assignment):
    """Memory sizes of a `StepProgram` from XLA's `BufferAssignmentProto`: dict."""
    sizes = dict.fromkeys(("argument_bytes", "output_bytes", "aliased_bytes", "temporary_bytes"), 0)
    for buffer in assignment.buffer_allocations:
        is_argument, is_output = buffer.is_entry_computation_parameter, buffer.maybe_live_out
        is_other = is_argument or is_output or buffer.is_constant or buffer.is_thread_local
        sizes["argument_bytes"] += is_argument * buffer.size
        sizes["output_bytes"] += is_output * buffer.size
        sizes["aliased_bytes"] += (is_argument and is_output) * buffer.size
        sizes["temporary_bytes"] += (not is_other) * buffer.size
    return sizes


def _program_for_absent(target, function, batch):
    """Compile a `tf.function(..., jit_compile=True)` for the first device of a `Target`: `StepProgram`.

    JAX's compiler gets the program as HLO before any optimisation. JAX promises none of the names used here.
    """
    from jax.extend.backend import get_compile_options
    from jaxlib.xla_client import DeviceList

    compiler_ir = function.experimental_get_compiler_ir(batch)
    # Unoptimised, the program is the same for every platform but for the forms that we chose
    module = _as_stablehlo(compiler_ir(stage="hlo_serialized", platform_name="CPU"))
    device = target.devices[0]
    start = time.perf_counter()
    options = get_compile_options(1, 1, env_options_overrides=target.compiler_options)
    compiled = device.client.compile(module, DeviceList((device,)), options)
    seconds = time.perf_counter() - start
    try:
        counts = compiled.cost_analysis()
    except RuntimeError:  # the compiler for GPUs has no counts
        counts = {}
    counts = counts[0] if isinstance(counts, list) else counts
    (program,) = compiled.hlo_modules()
    return compiled_program(program.to_string(), seconds, counts, compiled.get_compiled_memory_stats())


def _as_stablehlo(serialized):
    """A serialized `xla.HloModuleProto` as JAX's compilers take it."""
    from jax.extend.mlir import hlo_to_stablehlo
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.mlir import ir

    with make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(serialized))
        copies = []

        def note(operation):
            if operation.name == "mhlo.copy":
                copies.append(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(note)
        # TensorFlow copies variables; StableHLO has no such operation, and the compiler needs none
        for copy in copies:
            copy.results[0].replace_all_uses_with(copy.operands[0])
            copy.erase()
    return module
