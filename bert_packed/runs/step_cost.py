"""Cost of a training step on this machine, estimated before it is compiled.

Legend: B packs per batch, S pack length.
"""

import time

from keras import ops

from bert_packed.training.backend import compiled

MATMUL_SIZE, LARGEST_MATMUL = 1024, 8192
LEAST_SECONDS = 2e-3
# Real steps of bert-tiny to bert-base took this much more than their matrix products: element-wise work,
# softmax and the update come on top
OVERHEAD = 1.5


def step_flops(model_flops, spec, batch_size):
    """Floating-point operations of one step, forward and backward, over full packs.

    `model_flops` is an objective's function from sums to operations, `spec` a `schema.PackSpec`.
    """
    num_tokens = batch_size * spec.max_seq_length
    sums = {
        "num_tokens": num_tokens,
        # Attention computes its two S x S products in full: the mask does not save them
        "num_pairs": num_tokens * spec.max_seq_length,
        "num_predictions": batch_size * (spec.max_predictions_per_pack or spec.max_seq_length),
        "num_sequences": 0,
    }
    return model_flops(sums)


def measured_flops_per_second(repeats=10, dtype="float32"):
    """This machine's rate at a compiled matrix product of "float32" or "bfloat16": the best of `repeats`."""
    # The best counts, as other programs slow some of these milliseconds down, but not a whole run. The side
    # grows from 1024 by doubling: on a small product an accelerator would spend less than on being called
    product = compiled(lambda a: ops.matmul(a, a))
    size = MATMUL_SIZE
    while True:
        matrix = ops.full((size, size), 1e-3, dtype)
        # This call compiles, so it is not timed
        _wait(product(matrix))
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            _wait(product(matrix))
            seconds.append(time.perf_counter() - start)
        if min(seconds) >= LEAST_SECONDS or size >= LARGEST_MATMUL:
            return 2 * size**3 / min(seconds)
        size *= 2


def _wait(matrix):
    """Wait until a device has computed a matrix, of which one element is fetched."""
    # `convert_to_numpy` fails on a bfloat16 of TensorFlow
    return float(matrix[0, 0])


def estimate_step_seconds(model_flops, spec, batch_size, flops_per_second):
    """Rough seconds per step: for a BERT within a factor of two, on the CPUs where it was compared.

    A Mamba takes longer: most of its time goes into the scan, which is no matrix product.
    """
    return OVERHEAD * step_flops(model_flops, spec, batch_size) / flops_per_second


def count_full_steps(config):
    """Number of full steps that cost as much as all of a run: float."""
    num_steps = config.num_train_steps
    return config.growth.packs_before(num_steps) / config.train_batch_size if config.growth else num_steps
