"""Scalars that programs of layouts send are Table 1 of the paper exactly, 2D below 1D."""

import dataclasses

import keras
import pytest
from benchmark_command import tables_of

pytest.importorskip("jax", reason="pip install -e '.[jax]'")

from benchmarks.communication_volume import (
    OF_PRODUCTS,
    PASSES,
    count_passes,
    formula,
    small_shape,
)
from benchmarks.encoder_program import EncoderShape, compile_encoder
from benchmarks.parallelism import SCALAR_BYTES
from bert_packed.parallel import layouts, summa

pytestmark = [
    pytest.mark.both_backends,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax"),
]
TREE = ("optimus2d", "tree")


@pytest.fixture(scope="module", autouse=True)
def devices():
    """64 devices: this file's process has not computed anything yet."""
    from bert_packed.training.backend import make_virtual_devices

    make_virtual_devices(64)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "transport", "side"),
    [
        (*TREE, 2),
        ("megatron1d", "", 2),
        pytest.param("optimus2d", "gather", 2, marks=slow),
        *[pytest.param(*key, side, marks=slow) for side in (4, 8) for key in OF_PRODUCTS],
    ],
)
def test_what_is_sent_is_table_1_exactly(layout, transport, side):
    shape = small_shape(side)
    found = count_passes(layout, transport, side, shape)
    wanted = {name: formula(name, layout, transport, side, shape) for name in PASSES}
    assert {name: sent.products for name, sent in found.items()} == wanted
    if layout == "megatron1d":
        assert not any(sent.others for sent in found.values())
    else:  # norms and biases: little, and not nothing
        assert all(0 < sent.others < 0.1 * sent.products for sent in found.values())


@pytest.mark.slow
def test_every_layer_sends_as_much():
    shape = dataclasses.replace(small_shape(2), num_layers=3)
    for name, sent in count_passes("megatron1d", "", 2, shape).items():
        assert sent.products == formula(name, "megatron1d", "", 2, shape)


def test_one_broadcast_left_out_is_seen(monkeypatch):
    broadcast = summa.broadcast

    def without_last(block, axis, root):
        is_last = axis == summa.COLUMN and root == summa.size(axis) - 1
        return block if is_last else broadcast(block, axis, root)

    monkeypatch.setattr(summa, "broadcast", without_last)
    shape = small_shape(2)
    (sent,) = count_passes(*TREE, 2, shape, names=("forward",)).values()
    # one of two blocks of the hidden states is missing before each of the four products: h, h, h and 4 h wide
    assert formula("forward", *TREE, 2, shape) - sent.products == 7 * shape.bsh / 4


def test_what_the_forward_pass_sent_is_not_kept(monkeypatch):
    """XLA would take what the gradient sends for what has been sent: the count is below Table 1."""
    monkeypatch.setattr(layouts, "_sent_here", lambda *blocks: blocks)
    shape = small_shape(2)
    name = "backward, all kept"
    sent = count_passes(*TREE, 2, shape, names=(name,))[name].products
    # only the sums of its products are left: half of 14 bsh + 24 h^2
    assert sent == formula(name, *TREE, 2, shape) / 2


@pytest.mark.slow
def test_tables_of_the_command_keep_what_it_promises(tmp_path, monkeypatch):
    """The whole command; this process has its devices."""
    monkeypatch.setattr("bert_packed.training.backend.make_virtual_devices", lambda number: None)
    tables = tables_of("parallelism", tmp_path, devices=4, num_layers=1)  # status 0
    counts = tables["communication"]
    assert len(counts) == 12 and {row["equal"] for row in counts} == {"yes"}
    peaks = {row["layout"]: row["peak, MiB"] for row in tables["memory"]}
    assert peaks["optimus2d"] < peaks["megatron1d"] < peaks["none"]


def test_kernels_of_a_program_are_its_share():
    """Arguments are the weights, the inputs, the gradient of what comes out, and the ids of a row's packs."""
    shape = EncoderShape(batch=4, length=64, width=64, num_heads=4, num_layers=1)
    program = compile_encoder(shape, "optimus2d", 2, remat=True)
    kernels = 12 * shape.width**2 // 4
    vectors = 13 * shape.width // 2  # biases of 3 + 1 + 4 + 1 widths, two norms
    hidden, ids = shape.bsh // 4, shape.batch * shape.length // 2
    assert program.argument_bytes == SCALAR_BYTES * (kernels + vectors + 2 * hidden + ids)
