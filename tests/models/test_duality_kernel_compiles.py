"""The kernels of a Mamba-2's scan compiled for TPUs that are not here: no loop over chunks is left.

Legend: B packs per batch, S pack length, E inner width, G groups of heads, Z states of a channel.
"""

import functools

import keras
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
from compiled_kernels import KERNEL, compile_operator  # noqa: E402

from bert_packed.architectures.mamba2 import state_space_duality  # noqa: E402
from bert_packed.kernels.tpu import duality as tpu_duality  # noqa: E402

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")


def compiled(kind, packs, length, heads, head_width, groups, states, dtype, scan=tpu_duality.ssd_pack):
    """The scan forward and backward, for one device."""
    of_channels, of_heads = (packs, length, heads * head_width), ("float32", heads)
    of_states = dtype, packs, length, groups, states
    steps = "float32", packs, length, heads
    return compile_operator(
        kind,
        scan,
        [(dtype, *of_channels), steps, of_heads, of_states, of_states, of_heads],
        [("int32", packs, length), ("float32", packs, states, heads * head_width)],
        ("float32", *of_channels),
    )


@pytest.mark.parametrize(
    ("kind", "packs", "length", "heads", "head_width", "groups", "states", "dtype"),
    [
        ("v5e", 1, 4096, 24, 64, 1, 128, "bfloat16"),  # mamba2-130m
        ("v6e", 2, 4096, 80, 64, 1, 128, "bfloat16"),  # mamba2-2.7b
        ("v6e", 1, 512, 24, 64, 1, 128, "float32"),
        ("v5e", 2, 512, 80, 64, 8, 128, "bfloat16"),
        ("v5e", 1, 512, 64, 64, 1, 256, "float32"),
        ("v5e", 2, 300, 3, 64, 1, 128, "bfloat16"),  # chunks and vectors after padding
        ("v6e", 1, 60, 4, 48, 2, 16, "float32"),  # less than a chunk; a head is filled up to half a vector
        ("v5e", 1, 20, 4, 64, 1, 128, "bfloat16"),
        ("v5e", 1, 512, 4, 128, 1, 64, "bfloat16"),  # a head in a vector
        ("v5e", 1, 512, 40, 100, 1, 128, "float32"),  # a head is filled up to a vector
    ],
)
def test_two_kernels_compute_a_scan(kind, packs, length, heads, head_width, groups, states, dtype):
    program = compiled(kind, packs, length, heads, head_width, groups, states, dtype)
    text = program.as_text()
    assert text.count(KERNEL) == 2
    assert " while(" not in text
    if length == 4096:  # else few chunks: their states are the most
        # States before chunks are as large as an array of the tokens. Weights of all chunks would be twice
        # that, as would their decays and gradients
        of_tokens = 4 * packs * length * heads * head_width
        assert program.memory_analysis().temp_size_in_bytes < 3 * of_tokens


def test_the_other_form_has_no_kernel():
    """A control of the test above."""
    scan = functools.partial(state_space_duality.ssd_pack, chunk_length=128)
    text = compiled("v5e", 1, 512, 4, 64, 1, 128, "bfloat16", scan).as_text()
    assert KERNEL not in text and " while(" in text
