"""The kernels compiled for devices that are not here, in the tiles of runs: they fit, memory grows with S.

Legend: B packs per batch, S pack length, N heads, H head width, D = N * H.
"""

import functools

import keras
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
from jax import numpy as jnp  # noqa: E402
from test_packed_attention import SEED, attend  # noqa: E402

from bert_packed.kernels.gpu import attention as gpu_attention  # noqa: E402
from bert_packed.kernels.tpu import attention as packed_attention  # noqa: E402
from bert_packed.layers.context import (  # noqa: E402
    PackContext,
    attend_in_sequences,
)
from bert_packed.layers.dropout import Dropout  # noqa: E402
from bert_packed.parallel.targets import absent_target  # noqa: E402

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
WIDTH = 768  # D
NUM_TOKENS = 8192  # of each batch, about
WITHOUT_SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"  # else registers overflow to memory
# JAX says from 0.11 that it will take Triton out of Pallas: see `test_kernels.py`
TRITON = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
BASE = {"head_width": 64, "dtype": "bfloat16", "rate": 0.1}  # as bert-base


@pytest.fixture(scope="module", autouse=True)
def compiler_of_a_run():
    """All optimisations, which other tests do without."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


def attend_as_the_model(query_BSNH, key_BSNH, value_BSNH, ids_BS, rate):
    """The model's dense attention."""
    dropout = Dropout(rate, dtype=query_BSNH.dtype)
    dropout.given_seed = SEED
    context = PackContext(ids_BS, None)
    return attend_in_sequences((query_BSNH, key_BSNH, value_BSNH), context, dropout, training=True)


target_of = functools.cache(lambda kind: absent_target(f"{kind}:1"))
attend_on = {
    "tpu": functools.partial(attend, kernel=packed_attention),
    "gpu": functools.partial(attend, kernel=gpu_attention),
}


@functools.cache
def compiled(kind, length, head_width, dtype, rate, attend=None, **options):
    """Attention forward and backward, from and to arrays `[B, S, D]`, for one device."""
    target = target_of(kind)
    attend = attend or attend_on[target.platform]
    shape = (NUM_TOKENS // length, length, WIDTH)

    def forward_and_backward(query_BSD, key_BSD, value_BSD, ids_BS, gradient_BSD):
        def forward(*of_tokens):
            heads = (of.reshape(*shape[:2], -1, head_width) for of in of_tokens)
            return attend(*heads, ids_BS=ids_BS, rate=rate).reshape(shape)

        result_BSD, pull_back = jax.vjp(forward, query_BSD, key_BSD, value_BSD)
        return result_BSD, pull_back(gradient_BSD)

    (device,) = target.devices
    sharding = jax.sharding.SingleDeviceSharding(device)
    of_tokens = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    ids_BS = jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=sharding)
    with jax.default_device(device):
        lowered = jax.jit(forward_and_backward).lower(*[of_tokens] * 3, ids_BS, of_tokens)
    return lowered.compile({**target.compiler_options, **options})


def temporary_bytes(*arguments, **keywords):
    return compiled(*arguments, **keywords).memory_analysis().temp_size_in_bytes


# Each length with two widths of heads, with and without dropout, for both devices
@pytest.mark.parametrize(
    ("kind", "length", "head_width", "dtype", "rate"),
    [
        ("v5e", 384, 32, "bfloat16", 0.1),
        ("v6e", 384, 128, "bfloat16", 0.0),
        ("v6e", 512, 64, "bfloat16", 0.1),
        ("v5e", 512, 32, "float32", 0.0),
        ("v5e", 2048, 64, "bfloat16", 0.1),
        ("v6e", 2048, 32, "bfloat16", 0.0),
        ("v5e", 8192, 64, "bfloat16", 0.1),
        ("v6e", 8192, 128, "float32", 0.1),
    ],
)
def test_two_kernels_keep_scores_on_the_chip(kind, length, head_width, dtype, rate):
    program = compiled(kind, length, head_width=head_width, dtype=dtype, rate=rate)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
    # All scores are S / H times an array of the tokens
    of_tokens = NUM_TOKENS * WIDTH * jnp.dtype(dtype).itemsize
    assert program.memory_analysis().temp_size_in_bytes < of_tokens / 4


@pytest.mark.filterwarnings(TRITON)
@pytest.mark.parametrize(
    ("length", "head_width", "dtype", "rate"),
    [
        (384, 32, "bfloat16", 0.1),
        (384, 96, "float32", 0.1),  # padded to 128
        (512, 64, "bfloat16", 0.1),
        (512, 64, "float32", 0.1),
        (2048, 128, "bfloat16", 0.1),
        (8192, 32, "float32", 0.0),
    ],
)
def test_three_kernels_keep_scores_in_registers(length, head_width, dtype, rate):
    given = {"head_width": head_width, "dtype": dtype, "rate": rate, WITHOUT_SPILLS: True}
    program = compiled("h100", length, **given)
    assert program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    of_tokens = NUM_TOKENS * WIDTH * jnp.dtype(dtype).itemsize
    if head_width != 96:  # where the padded tokens are temporaries, too
        assert program.memory_analysis().temp_size_in_bytes < of_tokens / 4


@pytest.mark.filterwarnings(TRITON)
def test_larger_tiles_do_not_fit_the_registers(monkeypatch):
    """A control of the test above."""
    monkeypatch.setattr(gpu_attention, "TILES", {"bfloat16": 128})
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compiled("h100", 1024, **BASE, **{WITHOUT_SPILLS: True})


@pytest.mark.filterwarnings(TRITON)
@pytest.mark.parametrize("kind", ["v5e", "h100"])
def test_temporaries_are_linear_in_the_length(kind):
    """Of as many tokens, in packs four times as long: no more."""
    short, long = (temporary_bytes(kind, length, **BASE) for length in (2048, 8192))
    assert 0 < long < 1.1 * short


@pytest.mark.filterwarnings(TRITON)
@pytest.mark.parametrize("kind", ["v6e", "h100"])
def test_temporaries_are_a_hundredth_of_the_dense_path(kind):
    """Which keeps scores: one array of them in bfloat16 is a quarter of its own."""
    packed = temporary_bytes(kind, 512, **BASE)
    dense = temporary_bytes(kind, 512, **BASE, attend=attend_as_the_model)
    assert packed < dense / 100
