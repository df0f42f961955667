"""The scan's kernels compiled for devices that are not here: no loop over tokens is left outside of them.

Legend: B packs per batch, S pack length, E inner width, Z states of a channel.
"""

import functools

import keras
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
from compiled_kernels import KERNEL, compile_operator  # noqa: E402

from bert_packed.architectures.mamba import selective_scan  # noqa: E402
from bert_packed.kernels.gpu import selective_scan as gpu_scan  # noqa: E402
from bert_packed.kernels.tpu import selective_scan as tpu_scan  # noqa: E402

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
GPU_KERNEL = 'custom_call_target="__gpu$xla.gpu.triton"'
WITHOUT_SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"  # else registers overflow to memory
# JAX says from 0.11 that it will take Triton out of Pallas: see `test_kernels.py`
TRITON = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"


def compiled(
    kind,
    packs,
    length,
    width,
    num_states,
    dtype="float32",
    has_positions=True,
    scan=tpu_scan.ssm_pack,
    **options,
):
    """The scan forward and backward, for one device."""
    of_channels, of_states = ("float32", packs, length, width), (dtype, packs, length, num_states)
    decays = "float32", num_states, width
    positions = ("int32", packs, length) if has_positions else None
    return compile_operator(
        kind,
        scan,
        [(dtype, packs, length, width), of_channels, decays, of_states, of_states],
        [positions, ("float32", packs, num_states, width)],
        of_channels,
        **options,
    )


@pytest.mark.parametrize(
    ("kind", "packs", "length", "width", "num_states", "dtype", "has_positions"),
    [
        ("v5e", 1, 4096, 2048, 16, "float32", True),
        ("v6e", 8, 4096, 2048, 16, "bfloat16", True),
        ("v6e", 1, 4096, 5120, 16, "bfloat16", False),  # mamba-2.8b's width
        ("v5e", 2, 300, 1536, 16, "bfloat16", True),  # chunks of 128 after padding, vectors of 6 rows
        ("v6e", 2, 64, 96, 5, "float32", True),  # less than a chunk and a vector
        ("v5e", 1, 256, 256, 128, "float32", False),  # as many states as a Mamba-2 has
    ],
)
def test_two_kernels_compute_a_scan(kind, packs, length, width, num_states, dtype, has_positions):
    program = compiled(kind, packs, length, width, num_states, dtype, has_positions)
    text = program.as_text()
    assert text.count(KERNEL) == 2
    assert " while(" not in text
    # The states of all tokens would be Z times an array of the tokens
    of_tokens = 4 * packs * length * width
    if length % 128 == 0:  # else padded tokens are temporaries, too
        assert program.memory_analysis().temp_size_in_bytes < of_tokens


@pytest.mark.filterwarnings(TRITON)
@pytest.mark.parametrize(
    ("packs", "length", "width", "num_states", "dtype", "has_positions"),
    [
        (1, 4096, 2048, 16, "float32", True),
        (8, 4096, 2048, 16, "bfloat16", True),
        (1, 4096, 5120, 16, "bfloat16", False),
        (2, 300, 100, 5, "bfloat16", True),  # chunks, channels and states after padding
    ],
)
def test_three_kernels_keep_states_in_registers(packs, length, width, num_states, dtype, has_positions):
    given = {"scan": gpu_scan.ssm_pack, WITHOUT_SPILLS: True}
    text = compiled("h100", packs, length, width, num_states, dtype, has_positions, **given).as_text()
    assert text.count(GPU_KERNEL) == 3
    assert text.count(" while(") == 2  # over chunks, forward and backward


@pytest.mark.filterwarnings(TRITON)
def test_more_states_do_not_fit_the_registers():
    """A control of the test above."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compiled("h100", 1, 256, 256, 128, scan=gpu_scan.ssm_pack, **{WITHOUT_SPILLS: True})


def test_the_loop_has_no_kernel():
    """A control of the test above."""
    text = compiled("v5e", 1, 256, 256, 16, scan=selective_scan.ssm_pack).as_text()
    assert KERNEL not in text and " while(" in text


def test_chunks_that_are_not_whole_vectors_are_refused():
    scan = functools.partial(tpu_scan.ssm_pack, chunk_length=100)
    with pytest.raises(ValueError, match="divisible by"):
        compiled("v5e", 1, 256, 256, 16, scan=scan)
