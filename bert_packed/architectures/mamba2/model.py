"""Packed Mamba-2: the blocks of a Mamba around state-space duality, which restarts with every sequence.

As Hugging Face's `Mamba2ForCausalLM` computes it.

Legend: B packs per batch, S pack length, D model width, E inner width, N heads, Z states of a channel,
G groups of heads, U channels of the convolution, W taps, X = W - 1 tokens before a pack.
"""

import functools

import keras
import numpy as np
from keras import ops

from bert_packed.architectures.mamba import model as mamba
from bert_packed.architectures.mamba.model import PackedMamba, RMSNorm, StepSizes, add_convolution, fan_in
from bert_packed.architectures.mamba.operators import conv1d_pack
from bert_packed.architectures.mamba2.config import Mamba2Config
from bert_packed.architectures.mamba2.state_space_duality import ssd_pack
from bert_packed.layers.fast_gradients import Linear, multiply


class SplitLinear(Linear):
    """A linear layer whose result comes in parts of some widths: list of float `[..., width]`.

    One product for each. Parts of one product would be copied.
    """

    def __init__(self, widths, **kwargs):
        super().__init__(sum(widths), **kwargs)
        self.places = np.cumsum(widths)[:-1].tolist()

    def call(self, inputs, training=None):
        parts = [multiply(inputs, one) for one in ops.split(self.kernel, self.places, axis=1)]
        if self.bias is None:
            return parts
        return [part + one for part, one in zip(parts, ops.split(self.bias, self.places), strict=True)]


class Mamba2Mixer(keras.layers.Layer):
    """The part of a Mamba-2 block between its norm and its residual.

    Args:
        convolve, duality: Functions of the arguments of `operators.conv1d_pack` and
            `state_space_duality.ssd_pack` that compute the same; None for these.
    """

    def __init__(self, config, convolve=None, duality=None):
        super().__init__(name="mixer", autocast=False)  # states stay float32
        self.config = config
        self.convolve, self.duality = convolve, duality
        width, inner = config.hidden_size, config.inner_size
        self.in_proj = SplitLinear(
            [inner, inner, 2 * config.group_size, config.num_heads],
            use_bias=config.use_bias,
            kernel_initializer=fan_in(width),
            name="in_proj",
        )
        self.norm = RMSNorm(config.layer_norm_epsilon, config.n_groups)
        self.out_proj = Linear(
            width,
            use_bias=config.use_bias,
            # Residuals add up over the blocks, as in GPT-2
            kernel_initializer=fan_in(inner * config.num_hidden_layers),
            name="out_proj",
        )

    def build(self, hidden_shape, *_):
        config, inner = self.config, self.config.inner_size
        self.in_proj.build(hidden_shape)
        self.norm.build((None, None, inner))
        self.out_proj.build((None, None, inner))
        self.conv_kernel_WU, self.conv_bias_U = add_convolution(self, config)
        decays = keras.initializers.RandomUniform(1.0, 16.0)  # as the authors' program
        self.a_log_N, self.skip_N, self.step_bias_N = (
            self.add_weight(shape=(config.num_heads,), initializer=initializer, name=name, autocast=False)
            for name, initializer in (
                ("A_log", lambda shape, dtype: ops.log(decays(shape, dtype))),
                ("D", "ones"),
                ("dt_bias", StepSizes(config)),
            )
        )

    def call(self, hidden_BSD, context, carried=None):
        """As `MambaMixer.call`; the tail is float `[B, X, U]`."""
        config, inner, position_ids_BS = self.config, self.config.inner_size, context.position_ids_BS
        states_BZE, tail_BXU = carried or (None, None)
        gate_BSE, x_BSE, bc_BSY, delta_BSN = self.in_proj(hidden_BSD)
        kernel_WU, bias_U = (
            None if weight is None else ops.cast(weight, x_BSE.dtype)
            for weight in (self.conv_kernel_WU, self.conv_bias_U)
        )

        def convolve(values, part):
            return (self.convolve or conv1d_pack)(
                values,
                *(None if each is None else each[..., part] for each in (kernel_WU, bias_U)),
                position_ids_BS,
                None if tail_BXU is None else tail_BXU[..., part],
            )

        # The two are convolved apart: a slice of both would be copied
        x_BSE, tail_BXE = convolve(x_BSE, slice(inner))
        bc_BSY, tail_BXY = convolve(bc_BSY, slice(inner, None))
        b_BSGZ, c_BSGZ = (
            ops.reshape(each, (*ops.shape(each)[:2], config.n_groups, config.state_size))
            for each in ops.split(bc_BSY, 2, axis=-1)
        )
        delta_BSN = ops.softplus(ops.cast(delta_BSN, "float32") + self.step_bias_N)
        if config.time_step_limit_min:
            delta_BSN = ops.maximum(delta_BSN, config.time_step_limit_min)
        if config.time_step_limit_max:
            delta_BSN = ops.minimum(delta_BSN, config.time_step_limit_max)
        duality = self.duality or functools.partial(ssd_pack, chunk_length=config.chunk_size)
        y_BSE, states_BZE = duality(
            x_BSE, delta_BSN, -ops.exp(self.a_log_N), b_BSGZ, c_BSGZ, self.skip_N, position_ids_BS, states_BZE
        )
        mixed_BSD = self.out_proj(self.norm(y_BSE * ops.silu(ops.cast(gate_BSE, "float32"))))
        return mixed_BSD, (states_BZE, ops.concatenate([tail_BXE, tail_BXY], axis=-1))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedMamba2(PackedMamba):
    """`PackedMamba` with Mamba-2's mixers."""

    config_class = Mamba2Config
    mixer_class = Mamba2Mixer

    def __init__(self, config, name="mamba2", **encoder):
        super().__init__(config, name, **encoder)


def make_model(head, config, num_outputs, remat=False, num_rows=0, convolve=None, duality=None):
    """A `PackedMamba2`, not yet built; arguments as in `packed_model.build_model`."""
    del head, num_outputs  # there is one head, whose outputs are the vocabulary
    return PackedMamba2(config, remat=remat, num_rows=num_rows, convolve=convolve, duality=duality)


def count_flops(head, config, sums):
    """Operations that a Mamba-2 needs to learn from sequences, counted as `bert.model.count_flops` does.

    6 L (D (2 E + 2 G Z + N) + E D)    per token; L blocks
    6 L W U                            per token, for the convolution
    16 L E Z                           per token, for its states
    6 D V                              per prediction
    """
    # A state takes 5 forward (the product with the state before, its input, the sum of both, the product with
    # C and its sum) and 11 backward: its gradient 3, and a product and a sum for each of decay, input, B and
    # C. Chunks take more, as products of matrices
    return mamba.count_flops(head, config, sums, per_state=16)
