"""Scalars that devices send for an encoder block, counted in compiled programs, against Table 1 of "An
Efficient 2D Method for Training Super-Large Deep Learning Models".

The table counts scalars that a device sends in one block, in the forward pass and in the backward pass:

    Megatron    (p - 1) / p   x  (c bsh)            an all-reduce of B scalars as 2 (p - 1) / p B, equation 5
    Optimus     log2(q) / q   x  (c bsh + k h^2)    a broadcast of B scalars as log2(q) B, equation 4

A broadcast of the tree transport is log2(q) collective-permutes of a block, so what its program sends is
the sum over these. The default transport, gather, sends less, (q - 1) / p x (c bsh + k h^2): a ring that
gathers B scalars of each of q devices, or reduces them, as (q - 1) B.
"""

import dataclasses
import fractions

from benchmarks.encoder_program import EncoderShape, WholeBlock, compile_encoder
from bert_packed.training.program_text import find_collectives, read_module

SCALAR_BYTES = 4  # float32
# A pass of a block has a name, arguments of `compile_encoder`, and the factors of Table 1: c for Megatron, c
# and k for Optimus. The paper prints the first and the last row, whose backward pass computes a whole block
# again; Section 4 says what is left without that. `--remat` here leaves out a block's last product: 4 bsh + 4
# h^2, and Megatron's all-reduce after it
PASSES = {
    "forward": ({"backward": False}, 4, (7, 12)),
    "backward, all kept": ({}, 4, (14, 24)),
    "backward, --remat": ({"remat": True}, 6, (17, 32)),
    "backward, whole block again": ({"remat": True, "block": WholeBlock}, 8, (21, 36)),
}
# Products of weights have these collectives; all else is norms, biases and their gradients
OF_PRODUCTS = {
    ("megatron1d", ""): ("all-reduce",),
    ("optimus2d", "tree"): ("collective-permute",),
    ("optimus2d", "gather"): ("all-gather", "reduce-scatter"),
}


@dataclasses.dataclass(frozen=True)
class Sent:
    """Scalars that a device sends in a run of a program: `products` for products of weights, and `others`."""

    products: fractions.Fraction
    others: fractions.Fraction

    def __sub__(self, other):
        return Sent(self.products - other.products, self.others - other.others)


def small_shape(side):
    """A block of which no few times bsh are as many as few times h^2: each shows in a sum of both."""
    return EncoderShape(batch=3 * side, length=20, width=16 * side, num_heads=side**2, num_layers=1)


def factor(layout, transport, side):
    """The factor of Table 1, exact where the side is a power of two."""
    devices = side**2
    if layout == "megatron1d":
        return fractions.Fraction(devices - 1, devices)
    if transport == "tree":
        # A tree has this many levels for each device of a side
        return fractions.Fraction((side - 1).bit_length(), side)
    return fractions.Fraction(side - 1, devices)


def formula(name, layout, transport, side, shape):
    """Scalars that a device sends in a pass of all blocks, by Table 1: `Fraction`; names are of `PASSES`."""
    _, megatron, (hidden, kernels) = PASSES[name]
    if layout == "megatron1d":
        volume = megatron * shape.bsh
    else:
        volume = hidden * shape.bsh + kernels * shape.width**2
    return shape.num_layers * volume * factor(layout, transport, side)


def count_sent(text, kinds):
    """Scalars that a device sends in a run of a program, from its optimised HLO in float32: `Sent`.

    Raises:
        ValueError: a loop has an unknown length.
    """
    products, others = fractions.Fraction(), fractions.Fraction()
    for one in find_collectives(read_module(text)):
        if one.times is None:
            raise ValueError("collectives must not be in a loop of unknown length")
        scalars = _share_sent(one) * one.num_bytes / SCALAR_BYTES
        if one.kind in kinds:
            products += scalars
        else:
            others += scalars
    return Sent(products, others)


def count_passes(layout, transport, side, shape, names=tuple(PASSES)):
    """Scalars that a device sends in each pass: dict to `Sent`; a backward pass without the forward one."""
    kinds = OF_PRODUCTS[layout, transport]
    found = {}
    for name in ("forward", *(name for name in names if name != "forward")):
        arguments, *_ = PASSES[name]
        program = compile_encoder(shape, layout, side, transport or "gather", **arguments)
        sent = count_sent(program.text, kinds)
        # A program with gradients computes the forward pass too
        found[name] = sent - found["forward"] if found else sent
    return found


def communication_rows(sides, make_shape=small_shape):
    """Counts beside Table 1's formulas: list of dicts for a table."""
    rows = []
    for side in sides:
        shape = make_shape(side)
        for layout, transport in OF_PRODUCTS:
            for name, sent in count_passes(layout, transport, side, shape).items():
                wanted = formula(name, layout, transport, side, shape)
                rows.append(
                    {
                        "devices": side**2,
                        "layout": layout,
                        "transport": transport,
                        "pass": name,
                        "formula": terms(name, layout, transport),
                        "scalars by formula": float(wanted),
                        "scalars counted": float(sent.products),
                        "equal": "yes" if sent.products == wanted else "NO",
                        "besides, %": 100 * float(sent.others / sent.products),
                    }
                )
    return rows


def _share_sent(collective):
    """Scalars sent per scalar that a device puts into a collective, by a ring algorithm."""
    size = collective.group_size
    return {
        "all-reduce": fractions.Fraction(2 * (size - 1), size),
        "all-gather": fractions.Fraction(size - 1),
        "reduce-scatter": fractions.Fraction(size - 1, size),
        "collective-permute": fractions.Fraction(1),
        "all-to-all": fractions.Fraction(size - 1, size),
    }[collective.kind]


def terms(name, layout, transport):
    """The formula of a pass, as text."""
    _, megatron, (hidden, kernels) = PASSES[name]
    if layout == "megatron1d":
        return f"(p-1)/p {megatron} bsh"
    units = {"tree": "log2(q)/q", "gather": "(q-1)/p"}[transport]
    return f"{units} ({hidden} bsh + {kernels} h^2)"
