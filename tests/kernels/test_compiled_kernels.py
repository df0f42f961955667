"""Kernels compiled forward and backward for devices that are not here: they fit, and keep no array too many.

The fault that this file alone finds: a kernel that the compiler for TPUs or GPUs refuses or wraps in loops.

Legend: B packs per batch, S pack length, N heads, H head width, E width, W taps, Z states of a channel,
G groups of heads.
"""

import dataclasses
import functools
import math

import keras
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
from jax import numpy as jnp  # noqa: E402

from bert_packed.architectures.mamba.operators import conv1d_pack, ssm_pack  # noqa: E402
from bert_packed.architectures.mamba2 import state_space_duality  # noqa: E402
from bert_packed.kernels.gpu import attention as gpu_attention  # noqa: E402
from bert_packed.kernels.gpu import selective_scan as gpu_scan  # noqa: E402
from bert_packed.kernels.tpu import attention as packed_attention  # noqa: E402
from bert_packed.kernels.tpu import convolution as tpu_convolution  # noqa: E402
from bert_packed.kernels.tpu import duality as tpu_duality  # noqa: E402
from bert_packed.kernels.tpu import selective_scan as tpu_scan  # noqa: E402
from bert_packed.layers.context import PackContext, attend_in_sequences  # noqa: E402
from bert_packed.layers.dropout import Dropout, packs_from  # noqa: E402
from bert_packed.parallel.targets import absent_target  # noqa: E402

pytestmark = [
    # Programs for devices that are not here are cached, but cannot be read back: they are compiled again
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
    # JAX says from 0.11 that it will take Triton out of Pallas: see `test_kernels.py`
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
KERNELS = {"tpu": 'custom_call_target="tpu_custom_call"', "gpu": 'custom_call_target="__gpu$xla.gpu.triton"'}
# Registers would otherwise overflow to memory
WITHOUT_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def dropout_of(rate, dtype="float32"):
    layer = Dropout(rate, dtype=dtype)
    layer.given_seed = np.array([5, 7], np.uint32)
    return layer


def in_heads(attend, head_width):
    """A function of arrays `[B, S, E]` from one of `[B, S, N, H]`."""

    def run(query_BSE, key_BSE, value_BSE, ids_BS):
        shape = (*query_BSE.shape[:2], -1, head_width)
        heads = (of_tokens.reshape(shape) for of_tokens in (query_BSE, key_BSE, value_BSE))
        return attend(*heads, ids_BS).reshape(query_BSE.shape), ()

    return run


def attend_by(module, rate):
    """A fused kernel of attention."""

    def attend(query_BSNH, key_BSNH, value_BSNH, ids_BS):
        num_packs, length, num_heads, _ = query_BSNH.shape
        with packs_from(0, num_packs):
            rows = dropout_of(rate).rows((num_packs, num_heads, length, length)) if rate else None
        return module.attend(query_BSNH, key_BSNH, value_BSNH, ids_BS, rows)

    return attend


def attend_densely(query_BSNH, key_BSNH, value_BSNH, ids_BS):
    """The model's attention without a kernel."""
    heads, dropout = (query_BSNH, key_BSNH, value_BSNH), dropout_of(0.1, query_BSNH.dtype)
    return attend_in_sequences(heads, PackContext(ids_BS, None), dropout, training=True)


def attention(length, dtype):
    """Shapes of inputs, of data, and of outputs, each (dtype, *shape); `None` is data that is left out.

    8,192 tokens of width 768. All scores would be S / H times an array of the tokens.
    """
    of_tokens = dtype, 8192 // length, length, 768
    return [of_tokens] * 3, [("int32", 8192 // length, length)], of_tokens


def convolution(packs, length, width, taps, dtype, has_positions=True):
    of_tokens = dtype, packs, length, width
    positions = ("int32", packs, length) if has_positions else None
    return (
        [of_tokens, (dtype, taps, width), (dtype, width)],
        [positions, (dtype, packs, taps - 1, width)],
        of_tokens,
    )


def scan(packs, length, width, states, dtype="float32", has_positions=True):
    of_channels, of_states = ("float32", packs, length, width), (dtype, packs, length, states)
    inputs = [(dtype, *of_channels[1:]), of_channels, ("float32", states, width), of_states, of_states]
    positions = ("int32", packs, length) if has_positions else None
    return inputs, [positions, ("float32", packs, states, width)], of_channels


def duality(packs, length, heads, head_width, groups, states, dtype):
    of_channels, of_heads = ("float32", packs, length, heads * head_width), ("float32", heads)
    of_states, steps = (dtype, packs, length, groups, states), ("float32", packs, length, heads)
    inputs = [(dtype, *of_channels[1:]), steps, of_heads, of_states, of_states, of_heads]
    return inputs, [("int32", packs, length), ("float32", packs, states, heads * head_width)], of_channels


target_of = functools.cache(lambda kind: absent_target(f"{kind}:1"))


@pytest.fixture(scope="module", autouse=True)
def compiler_of_a_run():
    """All optimisations, which other tests do without."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


def compile_operator(kind, operator, shapes):
    target, (inputs, data, outputs) = target_of(kind), shapes
    (device,) = target.devices
    sharding = jax.sharding.SingleDeviceSharding(device)

    def forward_and_backward(inputs, data, weights):
        found, pull_back, carried = jax.vjp(lambda *given: operator(*given, *data), *inputs, has_aux=True)
        return found, carried, pull_back(weights)

    def abstract(arrays):
        return [one and jax.ShapeDtypeStruct(one[1:], one[0], sharding=sharding) for one in arrays]

    arguments = abstract(inputs), abstract(data), *abstract([outputs])
    options = target.compiler_options | (WITHOUT_SPILLS if target.platform == "gpu" else {})
    with jax.default_device(device):
        return jax.jit(forward_and_backward).lower(*arguments).compile(options)


def temporary_bytes(*arguments):
    return compile_operator(*arguments).memory_analysis().temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at sizes of a run.

    Attributes:
        most: Limit of the temporaries, in float32 arrays of the outputs; None where padding is one of them.
        num_loops: Loops that are left outside of kernels.
    """

    kind: str
    operator: callable
    shapes: tuple
    most: float | None = None
    num_loops: int = 0

    def __str__(self):
        return "-".join(map(str, (self.kind, *self.shapes[2])))


def attending(kind, length, head_width, dtype, rate, most=1 / 4):
    operator = in_heads(attend_by(gpu_attention if kind == "h100" else packed_attention, rate), head_width)
    return Case(kind, operator, attention(length, dtype), most and most * jnp.dtype(dtype).itemsize / 4)


CASES = [
    attending("v5e", 384, 32, "bfloat16", 0.1),
    attending("v6e", 384, 128, "bfloat16", 0.0),
    attending("v5e", 512, 32, "float32", 0.0),
    attending("v5e", 2048, 64, "bfloat16", 0.1),
    attending("v6e", 8192, 128, "float32", 0.1),
    attending("h100", 384, 96, "float32", 0.1, None),  # padded to 128
    attending("h100", 512, 64, "bfloat16", 0.1),
    attending("h100", 512, 64, "float32", 0.1),
    attending("h100", 2048, 128, "bfloat16", 0.1),
    attending("h100", 8192, 32, "float32", 0.0),
    *(
        Case(kind, tpu_convolution.conv1d_pack, convolution(*sizes), most)
        for kind, sizes, most in (
            ("v5e", (1, 4096, 2048, 4, "float32"), 1),
            ("v6e", (8, 4096, 5120, 4, "bfloat16"), 1),  # mamba-2.8b's width
            ("v5e", (2, 1024, 256, 4, "float32", False), 1),  # B and C of a Mamba-2
            ("v6e", (2, 300, 200, 4, "bfloat16"), None),  # tokens and channels after padding
            ("v5e", (2, 20, 96, 2, "float32"), None),  # less than a piece and a vector
            ("v6e", (1, 512, 1536, 10, "bfloat16"), 1),  # an edge of more than a vector
        )
    ),
    # The states of all tokens would be Z times an array of the tokens
    *(
        Case(kind, tpu_scan.ssm_pack, scan(*sizes), most)
        for kind, sizes, most in (
            ("v5e", (1, 4096, 2048, 16, "float32"), 1),
            ("v6e", (1, 4096, 5120, 16, "bfloat16", False), 1),  # mamba-2.8b's width
            ("v5e", (2, 300, 1536, 16, "bfloat16"), None),  # chunks of 128 after padding, vectors of 6 rows
            ("v6e", (2, 64, 96, 5, "float32"), None),  # less than a chunk and a vector
            ("v5e", (1, 256, 256, 128, "float32", False), 1),  # as many states as a Mamba-2 has
        )
    ),
    *(
        Case("h100", gpu_scan.ssm_pack, scan(*sizes), None, 2)  # loops over chunks, forward and backward
        for sizes in (
            (8, 4096, 2048, 16, "bfloat16"),
            (1, 4096, 5120, 16, "float32", False),
            (2, 300, 100, 5, "bfloat16"),  # chunks, channels and states after padding
        )
    ),
    # States before chunks are as large as an array of the tokens. Weights of all chunks would be twice that,
    # as would their decays and gradients
    *(
        Case(kind, tpu_duality.ssd_pack, duality(*sizes), most)
        for kind, sizes, most in (
            ("v5e", (1, 4096, 24, 64, 1, 128, "bfloat16"), 3),  # mamba2-130m
            ("v6e", (2, 4096, 80, 64, 1, 128, "bfloat16"), 3),  # mamba2-2.7b
            ("v5e", (2, 512, 80, 64, 8, 128, "bfloat16"), None),
            ("v5e", (1, 512, 64, 64, 1, 256, "float32"), None),
            ("v5e", (2, 300, 3, 64, 1, 128, "bfloat16"), None),  # chunks and vectors after padding
            ("v6e", (1, 60, 4, 48, 2, 16, "float32"), None),  # a head fills half a vector
            ("v5e", (1, 512, 4, 128, 1, 64, "bfloat16"), None),  # a head in a vector
            ("v5e", (1, 512, 40, 100, 1, 128, "float32"), None),  # a head is filled up to a vector
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_alone_compute_an_operator(case):
    """Two on TPUs and three on GPUs, and no array of scores, taps or states of all tokens."""
    program = compile_operator(case.kind, case.operator, case.shapes)
    platform, text = target_of(case.kind).platform, program.as_text()
    assert text.count(KERNELS[platform]) == {"tpu": 2, "gpu": 3}[platform]
    assert text.count(" while(") == case.num_loops
    if case.most is not None:
        of_tokens = 4 * math.prod(case.shapes[2][1:])
        assert program.memory_analysis().temp_size_in_bytes < case.most * of_tokens


@pytest.mark.parametrize(
    ("operator", "shapes", "loops"),
    [
        (conv1d_pack, convolution(1, 4096, 2048, 4, "float32"), False),
        (ssm_pack, scan(1, 256, 256, 16), True),
        (
            functools.partial(state_space_duality.ssd_pack, chunk_length=128),
            duality(1, 512, 4, 64, 1, 128, "bfloat16"),
            True,
        ),
    ],
    ids=["convolution", "scan", "duality"],
)
def test_the_forms_for_all_devices_have_no_kernel(operator, shapes, loops):
    """A control of the test above."""
    program = compile_operator("v5e", operator, shapes)
    assert KERNELS["tpu"] not in program.as_text() and (" while(" in program.as_text()) == loops
    if not loops:
        assert program.memory_analysis().temp_size_in_bytes > 4 * math.prod(shapes[2][1:])


@pytest.mark.parametrize("kind", ["attention", "scan"])
def test_what_does_not_fit_the_registers_is_refused(monkeypatch, kind):
    """A control of the test above: larger tiles, or more states."""
    monkeypatch.setattr(gpu_attention, "TILES", {"bfloat16": 128})
    case = {
        "attention": (in_heads(attend_by(gpu_attention, 0.1), 64), attention(1024, "bfloat16")),
        "scan": (gpu_scan.ssm_pack, scan(1, 256, 256, 128)),
    }[kind]
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_operator("h100", *case)


@pytest.mark.parametrize("kind", ["v5e", "h100"])
def test_temporaries_of_attention_are_linear_in_the_length(kind):
    """Longer packs of as many tokens need no more; all scores need a hundred times as much."""
    cases = [attending(kind, length, 64, "bfloat16", 0.1) for length in (512, 2048, 8192)]
    least, short, long = (temporary_bytes(kind, case.operator, case.shapes) for case in cases)
    assert 0 < long < 1.1 * short
    assert least < temporary_bytes(kind, in_heads(attend_densely, 64), cases[0].shapes) / 100


def test_chunks_that_are_not_whole_vectors_are_refused():
    with pytest.raises(ValueError, match="divisible by"):
        compile_operator("v5e", functools.partial(tpu_scan.ssm_pack, chunk_length=100), scan(1, 256, 256, 16))
