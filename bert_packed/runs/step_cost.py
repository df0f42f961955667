"""What one training step will cost on this machine, before it is compiled.

Legend: B packs per batch, S pack length, D model width, F feed-forward width, P predictions per pack,
V vocabulary, L encoder blocks.
"""

import time

import numpy as np
from keras import ops

from bert_packed.training.engines.functional import compiled

MATMUL_SIZE = 1024
# Measured against real steps of bert-tiny to bert-base: element-wise work, softmax and the update come on
# top of the matrix products
OVERHEAD = 1.5


def matmul_flops(model_config, spec, batch_size):
    """Floating-point operations of the matrix products of one step, forward and backward.

    Backward costs twice the forward. Attention's two S x S products are counted in full: the mask does not
    save them.
    """
    c, length = model_config, spec.max_seq_length
    per_token = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size + 2 * length * c.hidden_size
    per_prediction = c.hidden_size**2 + c.hidden_size * c.vocab_size
    products = length * c.num_hidden_layers * per_token + spec.max_predictions_per_pack * per_prediction
    return 3 * 2 * batch_size * products


def measured_flops_per_second(repeats=10):
    """This machine's rate at a compiled float32 matrix product of side 1024, the best of `repeats`.

    The best, not the median: other programs slow some of these milliseconds down, but not a whole run.
    """
    product = compiled(lambda a: ops.matmul(a, a))
    matrix = ops.convert_to_tensor(np.full((MATMUL_SIZE, MATMUL_SIZE), 1e-3, np.float32))
    product(matrix)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        ops.convert_to_numpy(product(matrix))
        seconds.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / min(seconds)


def estimate_step_seconds(model_config, spec, batch_size):
    """Rough seconds per step: within a factor of two on the CPUs where it was compared."""
    return OVERHEAD * matmul_flops(model_config, spec, batch_size) / measured_flops_per_second()


def describe(seconds):
    """A duration for people: `0.8 s`, `12 min`, `3.5 h`, `40 days`."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / 86_400:,.0f} days"
