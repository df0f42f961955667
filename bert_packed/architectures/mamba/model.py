"""Packed Mamba: blocks of convolution and selective scan that restart with every sequence of a pack.

Mamba-1, as "PackMamba" trains it and as Hugging Face's `MambaForCausalLM` computes it. A Mamba-2
has another mixer in the same blocks.

Legend: B packs per batch, S pack length, D model width, E inner width, Z states of a channel, L low rank of
the step sizes, W taps of the convolution, X = W - 1 tokens before a pack, V vocabulary.
"""

import functools
import math

import keras
import numpy as np
from keras import ops

from bert_packed.architectures.mamba.config import MambaConfig
from bert_packed.architectures.mamba.operators import conv1d_pack, ssm_pack
from bert_packed.architectures.packed_model import PackedModel
from bert_packed.architectures.registry import CAUSAL_LM
from bert_packed.layers.context import PackContext
from bert_packed.layers.fast_gradients import Linear
from bert_packed.layers.layout import ONE_DEVICE
from bert_packed.layers.rematerialisation import rematerialised


def fan_in(size):
    """PyTorch's initial weights of a linear layer by its inputs: uniform within 1 / sqrt(size)."""
    return keras.initializers.RandomUniform(-(size**-0.5), size**-0.5)


def add_vocabulary(layer, config, name):
    """Float32 variable `[V, D]` of a Keras layer."""
    weights = keras.initializers.RandomNormal(stddev=config.initializer_range)
    shape = config.vocab_size, config.hidden_size
    return layer.add_weight(shape=shape, initializer=weights, name=name, autocast=False)


def add_convolution(layer, config):
    """Float32 variables of a Keras layer: kernel `[W, E]`, and bias `[E]` or None."""
    shape, weights = (config.conv_kernel, config.conv_size), fan_in(config.conv_kernel)
    kernel_WE = layer.add_weight(shape=shape, initializer=weights, name="conv1d_kernel")
    if not config.use_conv_bias:
        return kernel_WE, None
    return kernel_WE, layer.add_weight(shape=shape[1:], initializer="zeros", name="conv1d_bias")


class RMSNorm(keras.layers.Layer):
    """Root-mean-square normalization with a scale, computed in float32, of each of `num_groups` apart."""

    def __init__(self, epsilon, num_groups=1, dtype=None):
        super().__init__(name="RMSNorm", autocast=False, dtype=dtype)
        self.epsilon, self.num_groups = epsilon, num_groups

    def build(self, shape):
        self.scale_D = self.add_weight(shape=shape[-1:], initializer="ones", name="scale", autocast=False)

    def call(self, hidden_BSD):
        wide_BSD = ops.cast(hidden_BSD, "float32")
        length, width = wide_BSD.shape[1:]
        wide_BSGY = ops.reshape(wide_BSD, (-1, length, self.num_groups, width // self.num_groups))
        mean_BSG1 = ops.mean(ops.square(wide_BSGY), axis=-1, keepdims=True)
        wide_BSD = ops.reshape(wide_BSGY * ops.rsqrt(mean_BSG1 + self.epsilon), (-1, length, width))
        return ops.cast(wide_BSD * self.scale_D, self.compute_dtype)


class StepSizes(keras.initializers.Initializer):
    """Initial biases of the step sizes: their softplus is log-uniform in a range (Section 3.6 of "Mamba")."""

    def __init__(self, config):
        self.config = config
        self.uniform = keras.initializers.RandomUniform(
            math.log(config.time_step_min), math.log(config.time_step_max)
        )

    def __call__(self, shape, dtype=None):
        sizes = ops.maximum(ops.exp(self.uniform(shape, dtype)), self.config.time_step_floor)
        return sizes + ops.log(-ops.expm1(-sizes))


class MambaMixer(keras.layers.Layer):
    """The part of a Mamba block between its norm and its residual.

    Args:
        convolve, scan: Functions of the tensors of `operators.conv1d_pack` and
            `operators.ssm_pack` that compute the same; None for these.
    """

    def __init__(self, config, convolve=None, scan=None):
        super().__init__(name="mixer", autocast=False)  # states stay float32
        self.config = config
        self.convolve, self.scan = convolve, scan
        width, inner, rank = config.hidden_size, config.inner_size, config.step_rank
        self.in_proj = Linear(
            2 * inner, use_bias=config.use_bias, kernel_initializer=fan_in(width), name="in_proj"
        )
        self.x_proj = Linear(
            rank + 2 * config.state_size, use_bias=False, kernel_initializer=fan_in(inner), name="x_proj"
        )
        self.dt_proj = Linear(
            inner,
            kernel_initializer=fan_in(rank),
            bias_initializer=StepSizes(config),
            name="dt_proj",
            dtype="float32",  # the neighbours of a bias of -5 in bfloat16 are 1/32 away
        )
        # Residuals add up over the blocks, as in GPT-2
        weights = fan_in(inner * config.num_hidden_layers)
        self.out_proj = Linear(width, use_bias=config.use_bias, kernel_initializer=weights, name="out_proj")

    def build(self, hidden_shape, *_):
        config, inner = self.config, self.config.inner_size
        self.in_proj.build(hidden_shape)
        self.x_proj.build((None, None, inner))
        self.dt_proj.build((None, None, config.step_rank))
        self.out_proj.build((None, None, inner))
        self.conv_kernel_WE, self.conv_bias_E = add_convolution(self, config)
        # Decays of 1, 2, ... Z in each channel are kept as logarithms, so that they stay above 0
        numbers = np.repeat(np.arange(1, config.state_size + 1, dtype="float32")[None, :], inner, axis=0)
        self.a_log_EZ = self.add_weight(
            shape=(inner, config.state_size),
            initializer=lambda shape, dtype: ops.log(ops.convert_to_tensor(numbers, dtype)),
            name="A_log",
            autocast=False,
        )
        self.skip_E = self.add_weight(shape=(inner,), initializer="ones", name="D", autocast=False)

    def call(self, hidden_BSD, context, carried=None):
        """Mix the tokens of each sequence: float `[B, S, D]`, and `carried` for the pack after this one.

        `carried` is (states float32 `[B, Z, E]`, tail float `[B, X, E]`) of the pack before; None for zeros.
        """
        config = self.config
        states_BZE, tail_BXE = carried or (None, None)
        inner_BSE, gate_BSE = ops.split(self.in_proj(hidden_BSD), 2, axis=-1)
        kernel_WE, bias_E = (
            None if weight is None else ops.cast(weight, inner_BSE.dtype)
            for weight in (self.conv_kernel_WE, self.conv_bias_E)
        )
        convolve, scan = self.convolve or conv1d_pack, self.scan or ssm_pack
        inner_BSE, tail_BXE = convolve(inner_BSE, kernel_WE, bias_E, context.position_ids_BS, tail_BXE)
        low_BSL, b_BSZ, c_BSZ = ops.split(
            self.x_proj(inner_BSE), [config.step_rank, config.step_rank + config.state_size], axis=-1
        )
        delta_BSE = ops.softplus(self.dt_proj(ops.cast(low_BSL, "float32")))
        a_ZE = -ops.exp(ops.transpose(self.a_log_EZ))
        y_BSE, states_BZE = scan(
            inner_BSE, delta_BSE, a_ZE, b_BSZ, c_BSZ, context.position_ids_BS, states_BZE
        )
        y_BSE = y_BSE + ops.cast(inner_BSE, "float32") * self.skip_E
        y_BSE = ops.cast(y_BSE, inner_BSE.dtype) * ops.silu(gate_BSE)
        return self.out_proj(y_BSE), (states_BZE, tail_BXE)


class MambaBlock(keras.layers.Layer):
    """Norm, mixer, residual; the residual stays float32."""

    def __init__(self, mixer, epsilon, name):
        super().__init__(name=name, autocast=False)
        self.norm = RMSNorm(epsilon)
        self.mixer = mixer

    def build(self, hidden_shape, *_):
        self.norm.build(hidden_shape)
        self.mixer.build(hidden_shape)

    def call(self, hidden_BSD, context, carried=None, training=None):
        """float32 `[B, S, D]` to the same, and `carried` for the pack after this one."""
        mixed_BSD, carried = self.mixer(self.norm(hidden_BSD), context=context, carried=carried)
        return hidden_BSD + ops.cast(mixed_BSD, "float32"), carried


class MambaEncoder(keras.layers.Layer):
    """Token embeddings, blocks and the last norm, over packs.

    Args:
        mixer_class: `MambaMixer`, or a layer that is made and called as that is.
        remat: True to recompute each block in the backward pass instead of keeping its activations.
        num_rows: R, rows whose sequences continue from pack to pack (`pack_tfrecords.py --split_sequences`):
            in training each row's states and tail are handed to its next pack. 0 for independent packs.
        operators: Further arguments of `mixer_class`.
    """

    def __init__(self, config, mixer_class, remat=False, num_rows=0, **operators):
        super().__init__(name="backbone")
        self.config = config
        self.remat = remat
        self.num_rows = num_rows
        epsilon = config.layer_norm_epsilon
        self.blocks = [
            MambaBlock(mixer_class(config, **operators), epsilon, name=f"layers_{i}")
            for i in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(epsilon)

    def build(self, *_):
        config = self.config
        self.embeddings_VD = add_vocabulary(self, config, "embeddings")
        for block in self.blocks:
            block.build((None, None, config.hidden_size))
        self.norm.build((None, None, config.hidden_size))
        if self.num_rows:
            shapes = ((config.state_size, config.inner_size), (config.conv_kernel - 1, config.conv_size))
            names = ("carried_states", "carried_tail")
            self.carried = [
                [
                    self.add_weight(
                        shape=(self.num_rows, *shape),
                        initializer="zeros",
                        trainable=False,
                        autocast=False,
                        name=f"{name}_{number}",
                    )
                    for name, shape in zip(names, shapes, strict=True)
                ]
                for number in range(config.num_hidden_layers)
            ]

    def call(self, token_ids_BS, position_ids_BS, training=None):
        return self.run_blocks(self.embed(token_ids_BS), position_ids_BS, training=training)

    def embed(self, token_ids_BS):
        return ops.cast(ops.take(self.embeddings_VD, token_ids_BS, axis=0), "float32")

    def run_blocks(self, hidden_BSD, position_ids_BS, training=None):
        """The encoder after its embeddings."""
        if self.config.ablation_no_position_reset:
            position_ids_BS = None
        context = PackContext(None, position_ids_BS)  # positions alone show where a sequence starts
        for number, block in enumerate(self.blocks):
            is_carried = self.num_rows and training
            run = functools.partial(rematerialised, block) if self.remat else block
            given = {"carried": self._take(number, hidden_BSD.shape[0])} if is_carried else {}
            hidden_BSD, after = run(hidden_BSD, context=context, training=training, **given)
            if is_carried:
                self._put(number, after)
        return self.norm(hidden_BSD)

    def _take(self, number, num_packs):
        """`carried` for the next packs."""
        # `carried` is a queue of rows, so that each micro-batch finds its own
        return tuple(ops.convert_to_tensor(queue)[:num_packs] for queue in self.carried[number])

    def _put(self, number, after):
        for queue, new in zip(self.carried[number], after, strict=True):
            new = ops.stop_gradient(ops.cast(new, queue.dtype))
            # A step that is skipped because a number is not finite must not spoil those after it
            is_finite_B11 = ops.all(ops.isfinite(new), axis=(1, 2), keepdims=True)
            new = ops.where(is_finite_B11, new, 0.0)
            queue.assign(ops.concatenate([ops.convert_to_tensor(queue)[new.shape[0] :], new], axis=0))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedMamba(PackedModel):
    """Packed Mamba that predicts each next token: a dict of `logits`, float32 `[B, S, V]`.

    The output matrix is the token embeddings, unless a Mamba-2's config says otherwise. `sequence_ids` is
    not read.
    """

    config_class = MambaConfig
    mixer_class = MambaMixer
    head = CAUSAL_LM
    encoder_inputs = ("token_ids", "position_ids")

    def __init__(self, config, name="mamba", **encoder):
        super().__init__(config, name)
        self.backbone = MambaEncoder(config, self.mixer_class, **encoder)

    def add_weights(self):
        self.output_VD = None  # the embeddings
        if not self.config.tie_word_embeddings:
            self.output_VD = add_vocabulary(self, self.config, "lm_head")

    def encode(self, batch, training=None):
        return self.backbone(batch["token_ids"], batch["position_ids"], training=training)

    def embed(self, batch):
        return self.backbone.embed(batch["token_ids"])

    def encode_embedded(self, hidden_BSD, batch):
        return self.backbone.run_blocks(hidden_BSD, batch["position_ids"], training=False)

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.backbone.embeddings_VD if self.output_VD is None else self.output_VD
        return {"logits": ONE_DEVICE.float32_logits(hidden_BSD, table_VD)}


def make_model(head, config, num_outputs, remat=False, num_rows=0, convolve=None, scan=None):
    """A `PackedMamba`, not yet built; arguments as in `packed_model.build_model`."""
    del head, num_outputs  # there is one head, whose outputs are the vocabulary
    return PackedMamba(config, remat=remat, num_rows=num_rows, convolve=convolve, scan=scan)


def count_flops(head, config, sums, per_state=21):
    """Operations that a Mamba needs to learn from sequences, counted as `bert.model.count_flops` does.

    6 L N                    per token; L blocks, N weights of each, as the config's `block_weights`
    6 L W E                  per token, for the convolution; a Mamba-2's has more channels than E
    21 L E Z                 per token, for its states; `per_state` is the 21
    6 D V                    per prediction
    """
    # A state takes 7 forward (its exponent, the exponential, the product with the state before, its input,
    # the sum of both, the product with C and its sum) and 14 backward: the gradient of the state 3, a product
    # and a sum for each of step size, A, input, B and C, and a product that the first two share. The program
    # executes nearly twice as many: it recomputes states, and XLA recomputes some products
    of_convolution = 6 * config.conv_kernel * config.conv_size
    of_states = per_state * config.inner_size * config.state_size
    per_token = 6 * config.block_weights + of_convolution + of_states
    per_prediction = 6 * config.hidden_size * config.vocab_size
    of_tokens = config.num_hidden_layers * per_token * sums["num_tokens"]
    return of_tokens + per_prediction * sums["num_predictions"]
