"""The convolution's kernels compiled for TPUs that are not here: no loop and no array of a tap is left.

Legend: B packs per batch, S pack length, E width, W taps, X = W - 1 tokens before a pack.
"""

import keras
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
from compiled_kernels import KERNEL, compile_operator  # noqa: E402

from bert_packed.kernels.tpu import convolution as tpu_convolution  # noqa: E402
from bert_packed.layers import causal_convolution  # noqa: E402

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")


def compiled(
    kind, packs, length, width, taps, dtype, has_positions=True, convolve=tpu_convolution.conv1d_pack
):
    """The convolution forward and backward, for one device."""
    of_tokens = dtype, packs, length, width
    positions = ("int32", packs, length) if has_positions else None
    return compile_operator(
        kind,
        convolve,
        [of_tokens, (dtype, taps, width), (dtype, width)],
        [positions, (dtype, packs, taps - 1, width)],
        of_tokens,
    )


@pytest.mark.parametrize(
    ("kind", "packs", "length", "width", "taps", "has_positions", "dtype"),
    [
        ("v5e", 1, 4096, 2048, 4, True, "float32"),
        ("v6e", 8, 4096, 5120, 4, True, "bfloat16"),  # mamba-2.8b's width
        ("v5e", 2, 1024, 256, 4, False, "float32"),  # B and C of a Mamba-2
        ("v6e", 2, 300, 200, 4, True, "bfloat16"),  # tokens and channels after padding
        ("v5e", 2, 20, 96, 2, True, "float32"),  # less than a piece and a vector
        ("v6e", 1, 512, 1536, 10, True, "bfloat16"),  # an edge of more than a vector
    ],
)
def test_two_kernels_compute_a_convolution(kind, packs, length, width, taps, has_positions, dtype):
    program = compiled(kind, packs, length, width, taps, dtype, has_positions)
    text = program.as_text()
    assert text.count(KERNEL) == 2
    assert " while(" not in text
    if length % 256 == 0 and width % 128 == 0:  # else padded tokens are temporaries
        assert program.memory_analysis().temp_size_in_bytes < 4 * packs * length * width


def test_the_other_form_has_no_kernel():
    """A control of the test above."""
    convolve = causal_convolution.conv1d_pack
    program = compiled("v5e", 1, 4096, 2048, 4, "float32", convolve=convolve)
    assert KERNEL not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes > 4 * 4096 * 2048
