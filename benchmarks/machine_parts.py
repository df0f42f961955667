"""The parts that a training step of BERT is made of, each as a program of its own, forward and backward.

Legend: B packs per batch, S pack length, T = B * S tokens, D model width, N heads, H head width,
F feed-forward width, P predictions per pack, V vocabulary, L blocks.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from benchmarks.machine_rates import product_flops
from bert_packed.models.attention_products import attention_scores, weighted_values
from bert_packed.models.context import PackContext
from bert_packed.models.cpu_forms import gradients_for_cpus
from bert_packed.models.dropout import keep_mask
from bert_packed.models.layers import activation
from bert_packed.models.linear import multiply
from bert_packed.objectives.likelihood import nll_and_right
from bert_packed.training.engines.functional import compiled, gradient

SEED = (0, 1)  # of `keep_mask`
MOVES_OF_LAMB = 7  # weight and two moments read and written, gradient read
PASSES = 3  # products of a forward and backward pass: the result, and the gradients by both sides


@dataclasses.dataclass(frozen=True)
class Part:
    """What a step does `times` times.

    Attributes:
        name: For people.
        times: How often in a step.
        flops: Of its products, forward and backward, each time.
        exponentials: Exponentials, error functions and logarithms, each time.
        num_bytes: Of what must be read and written, each time, were nothing else in the step fused with it:
            inputs and the gradient of the result read, result and gradients of the inputs written.
        run: Function of the turn that computes it once and waits for the end.
        product: `(rows, depth, columns)` of its product; None without one.
    """

    name: str
    times: int
    flops: float
    exponentials: float
    num_bytes: int
    run: Callable
    product: tuple | None = None


def make_parts(config, batch, num_predictions):
    """The parts of a step on one batch, but those of a few rows, such as the next-sentence loss.

    Args:
        config: `ModelConfig`.
        batch: Batch dict of `[B, S]` arrays, for its `sequence_ids`, `token_ids` and `position_ids`.
        num_predictions: P.

    Returns:
        List of `Part`, largest arrays last.
    """
    batch_size, length = batch["sequence_ids"].shape
    width, inner, blocks = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads
    tokens, predictions = batch_size * length, batch_size * num_predictions
    scores = (batch_size, heads, length, length)
    head_width = width // heads
    split = (batch_size, length, heads, head_width)
    context = PackContext(ops.convert_to_tensor(batch["sequence_ids"]), None)
    rate, hidden_rate = config.attention_probs_dropout_prob, config.hidden_dropout_prob

    def attend(given):
        context_here = context.apart()  # its mask belongs to the program that makes it
        return _dropped(ops.softmax(context_here.hide(given[0]), axis=-1), rate)

    def normalise(given):
        hidden, found, scale, shift = given
        centred = hidden + _dropped(found, hidden_rate)
        centred = centred - ops.mean(centred, axis=-1, keepdims=True)
        variance = ops.mean(centred * centred, axis=-1, keepdims=True)
        return centred * ops.rsqrt(variance + config.layer_norm_eps) * scale + shift

    def embed(given):
        names = ("token_ids", "token_type_ids", "position_ids")
        return sum(ops.take(table, batch[name], axis=0) for table, name in zip(given, names, strict=True))

    def lose(given):
        return nll_and_right(given[0], labels)[0]

    labels = np.random.default_rng(0).integers(0, config.vocab_size, predictions)
    tables = [(rows, width) for rows in (config.vocab_size, config.type_vocab_size, length)]
    hidden, wide, logits = (tokens, width), (tokens, inner), (predictions, config.vocab_size)
    act = activation(config.hidden_act)
    return [
        _product("projections of attention", 4 * blocks, tokens, width, width),
        _product("feed-forward, in", blocks, tokens, width, inner),
        _product("feed-forward, out", blocks, tokens, inner, width),
        _heads_product(
            "scores of attention",
            blocks,
            attention_scores,
            [split, split],
            scores,
            (length, head_width, length),
        ),
        _heads_product(
            "values of attention",
            blocks,
            weighted_values,
            [scores, split],
            split,
            (length, length, head_width),
        ),
        _part("mask, softmax, dropout", blocks, attend, [scores], scores, np.prod(scores)),
        _part(config.hidden_act, blocks, lambda given: act(given[0]), [wide], wide, np.prod(wide)),
        _part("dropout, sum, norm", 2 * blocks, normalise, [hidden, hidden, (width,), (width,)], hidden),
        _part("embeddings", 1, embed, tables, (batch_size, length, width)),
        _product("vocabulary logits", 1, predictions, width, config.vocab_size, ops.matmul),
        _part("masked-LM loss", 1, lose, [logits], (predictions,), np.prod(logits)),
    ]


def optimizer_part(engine):
    """LAMB on all weights of an engine, with gradients of zero: a `Part`; the weights barely move."""
    weights, optimizer = engine.model.trainable_variables, engine.optimizer
    gradients = [ops.zeros(weight.shape) for weight in weights]
    num_bytes = 4 * MOVES_OF_LAMB * sum(int(np.prod(weight.shape)) for weight in weights)
    if keras.backend.backend() == "jax":
        import jax

        program = jax.jit(optimizer.stateless_apply)

        def run(_):
            values = [variable.value for variable in optimizer.variables]
            jax.block_until_ready(program(values, gradients, [weight.value for weight in weights]))

    else:
        import tensorflow as tf

        program = tf.function(lambda: optimizer.apply(gradients, weights), jit_compile=True)

        def run(_):
            program()
            ops.convert_to_numpy(optimizer.iterations)

    return Part("optimizer", 1, 0.0, 0.0, num_bytes, run)


def _product(name, times, rows, depth, columns, product=multiply):
    """A linear layer of `[R, D]` tokens, with its bias."""
    shape = (rows, depth, columns)
    flops = PASSES * product_flops(*shape)

    def linear(given):
        return product(given[0], given[1]) + given[2]

    shapes = [(rows, depth), (depth, columns), (columns,)]
    part = _part(name, times, linear, shapes, (rows, columns))
    return dataclasses.replace(part, flops=flops, product=shape)


def _heads_product(name, times, function, factors, result, shape):
    """A product of attention, of this shape for each pack and head."""
    flops = PASSES * 2 * float(np.prod(result)) * shape[1]
    part = _part(name, times, lambda given: function(*given), factors, result)
    return dataclasses.replace(part, flops=flops, product=shape)


def _part(name, times, function, shapes, result_shape, exponentials=0):
    rng = np.random.default_rng(0)
    given = [ops.convert_to_tensor(rng.normal(size=shape), "float32") for shape in shapes]
    weights = ops.convert_to_tensor(rng.normal(size=result_shape), "float32")

    def both(given, weights):
        # By the weights the gradient is the result; without it XLA would leave out what only that needs
        with gradients_for_cpus():  # as in the step
            return gradient(lambda one: ops.sum(function(one[0]) * one[1]))((given, weights))

    program = compiled(both)

    def run(_):
        gradients, result = program(given, weights)
        ops.convert_to_numpy(ops.ravel(result)[:1])  # wait for the device, and copy no more
        ops.convert_to_numpy(ops.ravel(gradients[0])[:1])

    num_numbers = 2 * sum(int(np.prod(shape)) for shape in [*shapes, result_shape])
    return Part(name, times, 0.0, float(exponentials), 4 * num_numbers, run)


def _dropped(values, rate):
    if rate == 0:
        return values
    kept = keep_mask(values.shape, rate, ops.convert_to_tensor(SEED, "uint32"))
    return ops.where(kept, values / (1 - rate), 0.0)
