"""Command line: what spreading a model over devices costs: what is sent, memory, largest batch, scaling.

KERAS_BACKEND=jax python -m benchmarks.parallelism --picture=parallelism.png
"""

import dataclasses
import math
import sys

from bert_packed.core.command_line import print_table, run
from bert_packed.core.output_files import write_json
from bert_packed.core.settings import InputError, check_settings, setting
from bert_packed.training.engines import choose_backend

PARTS = ("communication", "weights", "memory", "batch", "scaling")
GIBIBYTE = 2**30
NOTE = "Counts and memory of compiled programs, on virtual devices of one processor: nothing is run or timed."
DESCRIPTION = """
Figures of "An Efficient 2D Method for Training Super-Large Deep Learning Models", from compiled programs:
layouts megatron1d and optimus2d on squares of virtual devices. Nothing is run, and no time is measured: what
virtual devices of one processor take says nothing of real ones.

communication: scalars that a device sends for an encoder block, counted in the program, beside the formulas
of Table 1; "besides" is what norms and biases add. weights: how much of them is on a device, by the shardings
of a training step. memory: of encoder blocks forward and backward with --remat, at the shapes of Table 2 with
--num_layers; "none" is one device. batch: the largest that fits --memory_gib, Figure 9, by bisection over
compiled programs. scaling: Tables 2 and 3, the crossover of 1D and 2D, and isoefficiency, as arithmetic from
what is sent, with the time of a multiplication and of a scalar sent fitted to one row of Table 2 (Megatron on
64 devices), or given.

Exit status 1 where a count is not its formula, a kernel of optimus2d not 1/p on a device, or 2D not below 1D.
"""


def _parse_devices(text):
    # Heads of Megatron at Table 2's shapes divide by no other
    known = {str(4**power) for power in range(1, 8)}
    if not set(text.split(",")) <= known:
        raise ValueError("squares of 2, 4, 8, ..., separated by commas")
    return text


def _parse_parts(text):
    if not set(text.split(",")) <= set(PARTS):
        raise ValueError(f"of {', '.join(PARTS)}, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class ParallelismConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    devices: str = setting("4,16,64", "numbers of devices: 4, 16, 64, ...", parse=_parse_devices)
    parts: str = setting(",".join(PARTS), f"what to tell: {', '.join(PARTS)}", parse=_parse_parts)
    num_layers: int = setting(
        4, "encoder blocks of memory and batch; the paper has 24, which takes minutes a program", minimum=1
    )
    memory_gib: float = setting(16.0, "memory of a device, GiB: the paper's GPUs have 16", minimum=0.001)
    rate: float = setting(
        0.0, "multiplications that a device does in a second, for scaling; 0 = fitted", minimum=0
    )
    seconds_per_scalar: float = setting(
        0.0, "to send 4 bytes from a device to another, for scaling; 0 = fitted", minimum=0
    )
    efficiency: float = setting(
        0.5, "share of its time that a device computes, for isoefficiency", minimum=0.01, maximum=0.99
    )
    picture: str = setting("", "also draw the tables into this PNG")
    json: str = setting("", "also write all tables to this file")

    def __post_init__(self):
        check_settings(self)
        if bool(self.rate) != bool(self.seconds_per_scalar):
            raise InputError(
                "`rate` and `seconds_per_scalar` must be given together. Received: "
                f"rate={self.rate}, seconds_per_scalar={self.seconds_per_scalar}."
            )

    @property
    def sides(self):
        """q of each mesh, ascending."""
        return sorted({math.isqrt(int(number)) for number in self.devices.split(",")})


def main(config):
    """Compile, count, print, write; returns the exit status."""
    if choose_backend() != "jax":
        raise InputError("KERAS_BACKEND must be jax for layouts over devices. Received: tensorflow.")
    from bert_packed.training.engines.virtual_devices import make_virtual_devices

    make_virtual_devices(max(config.sides) ** 2)
    print(NOTE)
    tables = {}
    for part in PARTS:
        if part in config.parts.split(","):
            for name, rows in tables_of(part, config).items():
                print(f"\n{name}", flush=True)
                print_table(rows)
                tables[name] = rows
    if config.json:
        write_json(config.json, {"note": NOTE, **tables})
    if config.picture:
        from benchmarks.parallelism_picture import draw

        draw(tables, config.picture)
    return 0 if keeps_promises(tables) else 1


def tables_of(part, config):
    """The tables of a part: dict from name to rows."""
    # Keras and JAX: not for --help
    if part == "communication":
        from benchmarks.communication_counts import communication_rows

        return {part: communication_rows(config.sides)}
    from benchmarks import layout_memory, scaling_model

    if part == "weights":
        return {part: layout_memory.weight_rows(config.sides)}
    if part == "memory":
        return {part: layout_memory.memory_rows(config.sides, config.num_layers)}
    if part == "batch":
        budget = config.memory_gib * GIBIBYTE
        return {part: layout_memory.batch_rows(config.sides, config.num_layers, budget)}
    machine = scaling_model.fit_machine()
    if config.rate:
        machine = scaling_model.Machine(config.rate, config.seconds_per_scalar)
    return scaling_model.scaling_tables(machine, config.efficiency, bool(config.rate))


def keeps_promises(tables):
    """Whether counts are their formulas, kernels of optimus2d 1/p on a device, and 2D below 1D."""
    counted = all(row["equal"] == "yes" for row in tables.get("communication", ()))
    spread = all(
        row["1/p"] == "yes"
        for row in tables.get("weights", ())
        if row["layout"] == "optimus2d" and "kernels" in row["weights"]
    )
    peaks = {(row["devices"], row["layout"]): row["peak, MiB"] for row in tables.get("memory", ())}
    below = all(peaks[number, "optimus2d"] < peaks[number, "megatron1d"] for number, _ in peaks if number > 1)
    return counted and spread and below


if __name__ == "__main__":
    sys.exit(run(main, ParallelismConfig, DESCRIPTION))
