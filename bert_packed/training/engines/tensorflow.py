"""One training step as one XLA program on TensorFlow: forward, loss, accumulation, LAMB.

Legend: A micro-batches per step (accumulation), M packs per micro-batch, S pack length.
"""

import tensorflow as tf

from bert_packed.training.engines.memory import out_of_memory_names
from bert_packed.training.engines.variables import named_training_state, named_weights


class TensorFlowEngine:
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
        if optimizer is not None:
            optimizer.build(model.trainable_variables)
        self.compiled_train_step = tf.function(self._train_step, jit_compile=True, reduce_retracing=False)
        self.compiled_eval_step = tf.function(self._eval_step, jit_compile=True, reduce_retracing=False)

    @property
    def num_train_traces(self):
        """How often the training step was traced, and so compiled: 1 in a healthy run."""
        return self.compiled_train_step.experimental_get_tracing_count()

    def train_step(self, batch):
        """Take one optimizer step.

        Args:
            batch: Dict of arrays `[B, ...]`; M must divide B.

        Returns:
            Dict of float32 scalars: the sums over the batch, before the update.

        Raises:
            MemoryError: the device has too little memory for a micro-batch.
        """
        with out_of_memory_names("a training step", "micro_batch_size"):
            return self.compiled_train_step(batch)

    def eval_step(self, batch):
        """The sums over a batch, without dropout and without an update; raises `MemoryError`."""
        with out_of_memory_names("evaluation", "eval_batch_size"):
            return self.compiled_eval_step(batch)

    def gradients(self, batch, training=True):
        """Normalised gradients and sums of a batch, one per trainable variable; not compiled."""
        return self._accumulate(batch, training)

    def weights(self):
        """The model's weights by path below the model: dict of Keras variables."""
        return named_weights(self.model)

    def training_state(self):
        """What a resumed run needs besides weights, by path: optimizer and dropout seeds."""
        return named_training_state(self.model, self.optimizer)

    def _train_step(self, batch):
        gradients, sums = self._accumulate(batch, training=True)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return sums

    def _eval_step(self, batch):
        return self.sums(self.model(batch, training=False), batch)

    def _accumulate(self, batch, training):
        """Gradients of the step's loss, added up over micro-batches by a loop inside the program.

        A batch of B = 4 packs with M = 2 runs as `[[p0 p1], [p2 p3]]`; each part's loss is divided by the
        whole step's normalizers, so the parts add up to the gradient of all four at once.
        """
        normalizers = self._normalizers(batch)
        size = next(iter(batch.values())).shape[0]
        micro = self._micro_batch_size or size
        if micro == size:
            return self._micro_batch(batch, normalizers, training)
        parts = {
            name: tf.reshape(values, (size // micro, micro, *values.shape[1:]))
            for name, values in batch.items()
        }

        def add_part(index, gradients, sums):
            part = {name: values[index] for name, values in parts.items()}
            new_gradients, new_sums = self._micro_batch(part, normalizers, training)
            gradients = [total + new for total, new in zip(gradients, new_gradients, strict=True)]
            return index + 1, gradients, {name: sums[name] + new_sums[name] for name in sums}

        zeros = [tf.zeros(variable.shape) for variable in self.model.trainable_variables]
        no_sums = dict.fromkeys(self._sum_names, tf.zeros(()))
        num_parts = size // micro
        num_used = _num_used(parts["sequence_ids"]) if self._skips_empty else num_parts
        _, gradients, sums = tf.while_loop(
            lambda index, *_: index < num_used, add_part, (0, zeros, no_sums), maximum_iterations=num_parts
        )
        return gradients, sums

    def _micro_batch(self, batch, normalizers, training):
        with tf.GradientTape() as tape:
            sums = self.sums(self.model(batch, training=training), batch)
            losses = zip(self._loss_names, normalizers, strict=True)
            loss = tf.add_n([sums[name] / normalizer for name, normalizer in losses])
        gradients = tape.gradient(loss, [v.value for v in self.model.trainable_variables])
        # Embedding look-ups give sparse gradients, which a loop cannot carry
        return [tf.convert_to_tensor(gradient) for gradient in gradients], sums


def _num_used(sequence_ids_AMS):
    """Micro-batches up to the last that holds a sequence: int32 scalar."""
    is_used_A = tf.reduce_any(sequence_ids_AMS > 0, axis=(1, 2))
    return tf.reduce_max(tf.range(1, is_used_A.shape[0] + 1) * tf.cast(is_used_A, tf.int32))
