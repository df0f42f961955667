"""LAMB, AdamW and StableAdamW, the learning-rate schedule, and the packing correction of betas."""

import math
import types

import keras
from keras import ops


class MomentOptimizer(keras.optimizers.Optimizer):
    """Base of Adam, StableAdamW and LAMB, which differ in the `ratio` of the update.

        m, v    = moments of the gradient, corrected for their zero start if `corrects_bias`
        update  = m / (sqrt(v) + epsilon) + weight_decay_rate * w
        w       = w - learning_rate * ratio * update

    A variable whose gradient is NaN keeps its value and its moments; the step still counts for the schedule.
    A variable whose attribute `is_decayed` is false has no weight decay; `PackedModel.build` sets it. Without
    the attribute, vectors have none.
    """

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        weight_decay_rate=0.0,
        global_clipnorm=None,
        corrects_bias=True,
        **kwargs,
    ):
        super().__init__(learning_rate=learning_rate, global_clipnorm=global_clipnorm, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay_rate = weight_decay_rate
        self.corrects_bias = corrects_bias

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(variables, ["momentum", "velocity"])
        # The list is by index: under TensorFlow `update_step` gets the backend's variable, without attributes
        self._are_decayed = [
            getattr(variable, "is_decayed", len(variable.shape) > 1) for variable in variables
        ]
        # Numbers of values; an engine whose layout pads weights puts those without padding here
        self.sizes = [math.prod(variable.shape) for variable in variables]

    def moments_of(self, index):
        """First and second moment of the weight with this index: two variables of its shape."""
        return self._momentums[index], self._velocities[index]

    def ratio(self, index, variable, update, gradient, root):
        """The factor of a variable's update, a number or a scalar; `root` is sqrt(v), corrected as in it."""
        raise NotImplementedError

    def update_step(self, gradient, variable, learning_rate):
        dtype = variable.dtype
        # Keras's own optimizers call this too: nothing public finds the index of a backend's variable
        index = self._get_variable_index(variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        gradient = ops.cast(gradient, dtype)
        step = ops.cast(self.iterations + 1, dtype)
        beta_1, beta_2 = ops.cast(self.beta_1, dtype), ops.cast(self.beta_2, dtype)

        # XLA fuses a test of each element with the rest: a single flag would need a pass over the gradient
        # first
        counts = ops.isfinite(gradient)
        old_momentum, old_velocity = ops.convert_to_tensor(momentum), ops.convert_to_tensor(velocity)
        new_momentum = old_momentum * beta_1 + gradient * (1 - beta_1)
        new_velocity = old_velocity * beta_2 + ops.square(gradient) * (1 - beta_2)
        self.assign(momentum, ops.where(counts, new_momentum, old_momentum))
        self.assign(velocity, ops.where(counts, new_velocity, old_velocity))
        if self.corrects_bias:
            new_momentum = new_momentum / (1 - ops.power(beta_1, step))
            new_velocity = new_velocity / (1 - ops.power(beta_2, step))
        root = ops.sqrt(new_velocity)
        update = new_momentum / (root + self.epsilon)
        if self.weight_decay_rate > 0 and self._are_decayed[index]:
            update = update + self.weight_decay_rate * ops.convert_to_tensor(variable)
        ratio = self.ratio(index, variable, update, gradient, root)
        update = ops.cast(learning_rate, dtype) * (update * ratio)
        self.assign_sub(variable, ops.where(counts, update, ops.zeros_like(update)))

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # Keras would add up, over the replicas of `tf.distribute`, what the engine has added up and clipped
        return grads_and_vars

    def get_config(self):
        names = ("beta_1", "beta_2", "epsilon", "weight_decay_rate", "corrects_bias")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


class Lamb(MomentOptimizer):
    """LAMB (You et al. 2019), step for step `tfa.optimizers.LAMB`.

        ratio   = |w| / |update|    (1 where either norm is 0, or the variable is not decayed)

    `keras.optimizers.Lamb` is another algorithm: its weight decay stays outside the trust ratio.
    """

    def __init__(self, learning_rate=0.001, name="lamb", **kwargs):
        super().__init__(learning_rate, name=name, **kwargs)
        # A plain object hides the dict, which Keras and TensorFlow would track as the optimizer's attribute
        self._last = types.SimpleNamespace(ratios={})

    def ratio(self, index, variable, update, gradient, root):
        if not self._are_decayed[index]:
            return 1.0
        weight_norm, update_norm = _norm(variable), _norm(update)
        is_usable = ops.logical_and(weight_norm > 0, update_norm > 0)
        # The divisor inside is safe: `where` would still evaluate 0 / 0
        ratio = ops.where(is_usable, weight_norm / ops.where(is_usable, update_norm, 1.0), 1.0)
        self._last.ratios[index] = ratio
        return ratio

    def trust_ratios(self):
        """Statistics of the last update's ratios over the variables that are adapted.

        Call it once per update, inside the update's compiled program, whose values the ratios are.

        Returns:
            Dict of float32 scalars `trust_ratio_min`, `trust_ratio_median` and `trust_ratio_max`; {} where no
            variable is adapted.
        """
        ratios, self._last.ratios = self._last.ratios, {}
        if not ratios:
            return {}
        values = ops.stack([ops.cast(ratio, "float32") for ratio in ratios.values()])
        return {
            "trust_ratio_min": ops.min(values),
            "trust_ratio_median": _median(values),
            "trust_ratio_max": ops.max(values),
        }


class AdamWeightDecay(MomentOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017): a ratio of 1.

    google-research/bert's `AdamWeightDecayOptimizer` has no bias correction. That makes its first steps
    larger, by up to (1 - beta_1) / sqrt(1 - beta_2), about 3, and its fine-tuning on small data less stable.
    """

    def __init__(self, learning_rate=0.001, corrects_bias=True, name="adam_weight_decay", **kwargs):
        super().__init__(learning_rate, corrects_bias=corrects_bias, name=name, **kwargs)

    def ratio(self, index, variable, update, gradient, root):
        return 1.0


class StableAdamW(MomentOptimizer):
    """AdamW with the update clipping of Adafactor (Wortsman et al. 2023, Algorithm 2), as in torch-optimi.

        ratio   = 1 / max(1, rms),  rms = sqrt(mean((gradient / max(sqrt(v), epsilon))^2)) of the variable

    The ratio reduces the step of a variable, decay included, whose gradient has outgrown its second moment.
    The authors take it in place of clipping to a norm (`--max_grad_norm=0`); with both, the norm comes first.

    Decay is decoupled as in AdamW: the rate multiplies it. torch-optimi with `decouple_lr=True`, as for
    ModernBERT, divides the rate by its peak there: `weight_decay_rate = weight_decay / peak` is the same.
    """

    def __init__(self, learning_rate=0.001, name="stable_adamw", **kwargs):
        super().__init__(learning_rate, name=name, **kwargs)

    def ratio(self, index, variable, update, gradient, root):
        # The quotient is squared: the square of a small epsilon would be 0 in float32
        squares = ops.square(gradient / ops.maximum(root, self.epsilon))
        # `mean` would count the padding of a layout
        return 1.0 / ops.maximum(ops.sqrt(ops.sum(squares) / self.sizes[index]), 1.0)


class WarmupStableDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to the peak, then decay to the end value.

    The decay takes all steps after the warm-up, or the last `num_decay_steps` (warm-up, stable, decay). A
    peak of 4, 2 warm-up steps and 6 steps in total:

        step                                             0  1  2  3  4  5
        rate                                             2  4  4  3  2  1
        rate, num_decay_steps = 2                        2  4  4  4  4  2
        rate, decay_type = "1-sqrt"                      2  4  4  2  1.17  0.54

    A `decay_type` of "polynomial" is (1 - done)^power, where `done` is the share of the decay's steps that
    lie behind, and "1-sqrt" is 1 - sqrt(done) (Hägele et al. 2024), ModernBERT's.

    The schedule begins at `first_step`, the steps that an optimizer with kept moments has counted before.

    google-research/bert's starts at 0, so that the first step changes nothing, and decays from step 0 on, so
    that the rate jumps at the end of warm-up.
    """

    def __init__(
        self,
        peak,
        num_train_steps,
        num_warmup_steps=0,
        end=0.0,
        power=1.0,
        num_decay_steps=0,
        first_step=0,
        decay_type="polynomial",
    ):
        super().__init__()
        self.peak = peak
        self.num_train_steps = num_train_steps
        self.num_warmup_steps = num_warmup_steps
        self.end = end
        self.power = power
        self.num_decay_steps = num_decay_steps
        self.first_step = first_step
        self.decay_type = decay_type

    def __call__(self, step):
        step = ops.cast(step - self.first_step, "float32")
        warm = self.peak * (step + 1.0) / max(self.num_warmup_steps, 1)
        decay_steps = self.num_decay_steps or max(self.num_train_steps - self.num_warmup_steps, 1)
        left = ops.clip((self.num_train_steps - step) / decay_steps, 0.0, 1.0)
        height = 1.0 - ops.sqrt(1.0 - left) if self.decay_type == "1-sqrt" else ops.power(left, self.power)
        decayed = self.end + (self.peak - self.end) * height
        return ops.where(step < self.num_warmup_steps, warm, decayed)

    def get_config(self):
        names = ("peak", "num_train_steps", "num_warmup_steps", "end", "power", "num_decay_steps")
        return {name: getattr(self, name) for name in (*names, "first_step", "decay_type")}


# The keys are the values of `--optimizer`
OPTIMIZERS = {"lamb": Lamb, "adam": AdamWeightDecay, "stable_adamw": StableAdamW}


def correct_betas(beta_1, beta_2, packing_factor):
    """The packing correction, beta := beta^p: Sections 3.3 and D of "Efficient Sequence Packing ...".

    One step on p sequences per pack then moves the moments as far as p steps on one each: 0.81 -> 0.6561 for
    p = 2. The factor p is the mean number of sequences per pack, at least 1.
    """
    return beta_1**packing_factor, beta_2**packing_factor


def build_schedule(config, steps_before=0):
    """The learning-rate schedule of a `PretrainingConfig`; `steps_before` as in `build_optimizer`."""
    return WarmupStableDecay(
        config.learning_rate,
        config.num_train_steps,
        config.num_warmup_steps,
        config.end_learning_rate,
        config.decay_power,
        config.num_decay_steps,
        steps_before,
        config.decay_type,
    )


def build_optimizer(config, packing_factor=1.0, steps_before=0):
    """The optimizer of a `PretrainingConfig`.

    Args:
        config: `PretrainingConfig`.
        packing_factor: Factor for `--packing_correction=betas`.
        steps_before: Number of steps of the earlier runs whose moments the optimizer will get; the schedule
            begins there.
    """
    factor = packing_factor if config.packing_correction == "betas" else 1.0
    make = OPTIMIZERS[config.optimizer]
    return make(build_schedule(config, steps_before), **optimizer_settings(config, factor))


def optimizer_settings(config, packing_factor=1.0):
    """Arguments of `MomentOptimizer` from a `PretrainingConfig` or `FinetuneConfig`, as a dict."""
    beta_1, beta_2 = correct_betas(config.beta_1, config.beta_2, packing_factor)
    return {
        "beta_1": beta_1,
        "beta_2": beta_2,
        "epsilon": config.epsilon,
        "weight_decay_rate": config.weight_decay,
        "global_clipnorm": config.max_grad_norm or None,
    }


def trust_ratios(optimizer):
    """`Lamb.trust_ratios`; {} for other optimizers."""
    return optimizer.trust_ratios() if isinstance(optimizer, Lamb) else {}


def _norm(tensor):
    return ops.sqrt(ops.sum(ops.square(tensor)))


def _median(values_N):
    # Ranks are counted: TensorFlow sorts by `top_k`, whose result has a dynamic dimension
    number = values_N.shape[0]
    places_N = ops.arange(number)
    is_equal_NN = ops.equal(values_N[None, :], values_N[:, None])
    is_before_NN = ops.logical_or(
        values_N[None, :] < values_N[:, None],
        ops.logical_and(is_equal_NN, places_N[None, :] < places_N[:, None]),
    )
    ranks_N = ops.sum(ops.cast(is_before_NN, "int32"), axis=1)
    middle = [ops.where(ops.equal(ranks_N, rank), values_N, 0.0) for rank in ((number - 1) // 2, number // 2)]
    return ops.sum(middle[0] + middle[1]) / 2
