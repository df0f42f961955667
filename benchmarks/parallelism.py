"""Communication and memory of a model that is spread over devices, from compiled programs.

KERAS_BACKEND=jax python -m benchmarks.parallelism
"""

import dataclasses
import math
import sys

from benchmarks.runner import Settings, parse_names, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.training.engines import choose_backend

PARTS = COMMUNICATION, MEMORY = "communication", "memory"
MEBIBYTE = 2**20
SCALAR_BYTES = 4  # float32
# Table 2 has s, h and n over q, and b of its Optimus
LENGTH, WIDTH, HEADS, OPTIMUS_BATCH = 512, 1024, 16, 48
NOTE = "Counts and memory of compiled programs, on virtual devices of one processor: nothing is run or timed."


def _parse_devices(text):
    # No other number divides the heads of Megatron at Table 2's shapes
    known = {str(4**power) for power in range(1, 8)}
    if not set(text.split(",")) <= known:
        raise ValueError("squares of 2, 4, 8, ..., separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class ParallelismConfig(Settings):
    """Figures of "An Efficient 2D Method for Training Super-Large Deep Learning Models", from compiled
    programs: layouts megatron1d and optimus2d on squares of virtual devices. Nothing is run, and no time
    is measured: the time of virtual devices of one processor says nothing of real ones.

    communication: scalars that a device sends for an encoder block, with the tree the paper's cost of it,
    counted in the program, beside the formulas of Table 1; "besides" is what norms and biases add.
    memory: of encoder blocks forward and backward with --remat, at the shapes of Table 2 with
    --num_layers; "none" is one device.

    Exit status 1 where a count is not its formula, or 2D is not below 1D.
    """

    devices: str = setting("4,16,64", "numbers of devices: 4, 16, 64, ...", parse=_parse_devices)
    parts: str = setting(
        ",".join(PARTS),
        f"tables to make: {', '.join(PARTS)}",
        parse=lambda text: parse_names(text, PARTS),
    )
    num_layers: int = setting(
        4, "encoder blocks of memory; the paper has 24, which takes minutes a program", minimum=1
    )

    @property
    def sides(self):
        """q of each mesh, ascending."""
        return sorted({math.isqrt(int(number)) for number in self.devices.split(",")})


def main(config):
    """Compile, count, print, write; returns the exit status."""
    if choose_backend() != "jax":
        raise InputError("KERAS_BACKEND must be jax for layouts over devices. Received: tensorflow.")
    # These import Keras and JAX, which --help need not wait for
    from benchmarks import communication_volume
    from bert_packed.training.backend import make_virtual_devices

    # Devices are made once, for the largest mesh: a process cannot change their number later
    make_virtual_devices(max(config.sides) ** 2)
    tables = {}
    if COMMUNICATION in config.parts.split(","):
        tables[COMMUNICATION] = communication_volume.communication_rows(config.sides)
    if MEMORY in config.parts.split(","):
        tables[MEMORY] = memory_rows(config.sides, config.num_layers)
    show("parallelism", config, tables, [NOTE])
    return 0 if keeps_promises(tables) else 1


def table2_shape(side, layers):
    """The shape of Table 2 on q x q devices, with fewer layers."""
    from benchmarks.encoder_program import EncoderShape

    return EncoderShape(OPTIMUS_BATCH * side, LENGTH, WIDTH * side, HEADS * side, layers)


def memory_rows(sides, layers):
    """Memory of a device, MiB, for N blocks and their gradients with `--remat`, at Table 2's weak scaling."""
    from benchmarks.encoder_program import compile_encoder

    rows = []
    for side in sides:
        shape = table2_shape(side, layers)
        for layout in ("none", "megatron1d", "optimus2d"):
            program = compile_encoder(shape, layout, 1 if layout == "none" else side, remat=True)
            devices = 1 if layout == "none" else side**2
            rows.append(
                {
                    "devices": devices,
                    "layout": layout,
                    "batch": shape.batch,
                    "hidden": shape.width,
                    "arguments, MiB": program.argument_bytes / MEBIBYTE,
                    "results, MiB": program.output_bytes / MEBIBYTE,
                    # The arguments hold them, and the results their gradients
                    "kernels / p, MiB": layers * 12 * shape.width**2 * SCALAR_BYTES / devices / MEBIBYTE,
                    "temporaries, MiB": program.temporary_bytes / MEBIBYTE,
                    "peak, MiB": program.peak_bytes / MEBIBYTE,
                }
            )
    return rows


def keeps_promises(tables):
    """True if counts equal their formulas, and 2D is below 1D."""
    counted = all(row["equal"] == "yes" for row in tables.get(COMMUNICATION, ()))
    peaks = {(row["devices"], row["layout"]): row["peak, MiB"] for row in tables.get(MEMORY, ())}
    # One device has no layout
    below = all(peaks[number, "optimus2d"] < peaks[number, "megatron1d"] for number, _ in peaks if number > 1)
    return counted and below


if __name__ == "__main__":
    sys.exit(run(main, ParallelismConfig))
