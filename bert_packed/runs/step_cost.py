"""What one training step will cost on this machine, before it is compiled.

Legend: B packs per batch, S pack length, D model width, F feed-forward width, P predictions per pack,
V vocabulary, L encoder blocks.
"""

import time

from keras import ops

from bert_packed.training.engines.functional import compiled

MATMUL_SIZE, LARGEST_MATMUL = 1024, 8192
LEAST_SECONDS = 2e-3
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


def measured_flops_per_second(repeats=10, dtype="float32"):
    """This machine's rate at a compiled matrix product, the best of `repeats`.

    The best, not the median: other programs slow some of these milliseconds down, but not a whole run. The
    matrices have side 1024, or twice that, and so on, as long as a product takes under `LEAST_SECONDS`: an
    accelerator would spend less on a small one than on being called.

    Args:
        repeats: Products timed of each side.
        dtype: "float32" or "bfloat16", of the matrices.
    """
    product = compiled(lambda a: ops.matmul(a, a))
    size = MATMUL_SIZE
    while True:
        matrix = ops.full((size, size), 1e-3, dtype)
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
    """Until a device has computed a matrix; of which only one element is fetched."""
    return ops.convert_to_numpy(matrix[0, 0])


def estimate_step_seconds(model_config, spec, batch_size, flops_per_second):
    """Rough seconds per step: within a factor of two on the CPUs where it was compared."""
    return OVERHEAD * matmul_flops(model_config, spec, batch_size) / flops_per_second


def describe(seconds):
    """A duration for people: `0.8 s`, `12 min`, `3.5 h`, `40 days`."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / 86_400:,.0f} days"
