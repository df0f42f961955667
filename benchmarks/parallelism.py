"""Cost of spreading a model over devices: communication, weights, memory, largest batch, scaling.

KERAS_BACKEND=jax python -m benchmarks.parallelism --picture=parallelism.png
"""

import dataclasses
import math
import sys

from benchmarks.results import Settings, parse_names, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.training.engines import choose_backend

PARTS = ("communication", "weights", "memory", "batch", "scaling")
GIBIBYTE = 2**30
TRANSPORTS = {"tree": "C0", "gather": "C2"}  # to colors
NOTE = "Counts and memory of compiled programs, on virtual devices of one processor: nothing is run or timed."


def _parse_devices(text):
    # Heads of Megatron at Table 2's shapes divide by no other
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
    weights: their share on a device, by the shardings of a training step. memory: of encoder blocks
    forward and backward with --remat, at the shapes of Table 2 with --num_layers; "none" is one device.
    batch: the largest that fits --memory_gib, Figure 9, by bisection over compiled programs. scaling:
    Tables 2 and 3, the crossover of 1D and 2D, and isoefficiency, as arithmetic from these counts, with
    the time of a multiplication and of a scalar fitted to one row of Table 2 (Megatron on 64 devices).

    Exit status 1 where a count is not its formula, a kernel of optimus2d not 1/p on a device, or 2D not
    below 1D.
    """

    devices: str = setting("4,16,64", "numbers of devices: 4, 16, 64, ...", parse=_parse_devices)
    parts: str = setting(
        ",".join(PARTS),
        f"tables to make: {', '.join(PARTS)}",
        parse=lambda text: parse_names(text, PARTS),
    )
    num_layers: int = setting(
        4, "encoder blocks of memory and batch; the paper has 24, which takes minutes a program", minimum=1
    )
    memory_gib: float = setting(16.0, "memory of a device, GiB: the paper's GPUs have 16", minimum=0.001)
    picture: str = setting("", "also draw the tables into this PNG")

    @property
    def sides(self):
        """q of each mesh, ascending."""
        return sorted({math.isqrt(int(number)) for number in self.devices.split(",")})


def main(config):
    """Compile, count, print, write; returns the exit status."""
    if choose_backend() != "jax":
        raise InputError("KERAS_BACKEND must be jax for layouts over devices. Received: tensorflow.")
    from bert_packed.training.backend import make_virtual_devices

    # For the largest mesh, once: a process cannot change its number of devices later
    make_virtual_devices(max(config.sides) ** 2)
    tables = {}
    for part in PARTS:
        if part in config.parts.split(","):
            tables |= tables_of(part, config)
    show("parallelism", config, tables, [NOTE])
    if config.picture:
        draw(tables, config.picture)
    return 0 if keeps_promises(tables) else 1


def tables_of(part, config):
    """The tables of a part: dict from name to rows."""
    # Keras and JAX: not for --help
    from benchmarks import communication_volume, layout_memory, scaling_model

    if part == "communication":
        return {part: communication_volume.communication_rows(config.sides)}
    if part == "weights":
        return {part: layout_memory.weight_rows(config.sides)}
    if part == "memory":
        return {part: layout_memory.memory_rows(config.sides, config.num_layers)}
    if part == "batch":
        budget = config.memory_gib * GIBIBYTE
        return {part: layout_memory.batch_rows(config.sides, config.num_layers, budget)}
    return scaling_model.scaling_tables(scaling_model.fit_machine())


def keeps_promises(tables):
    """True if counts equal their formulas, kernels of optimus2d are 1/p on a device, and 2D is below 1D."""
    counted = all(row["equal"] == "yes" for row in tables.get("communication", ()))
    spread = all(
        row["1/p"] == "yes"
        for row in tables.get("weights", ())
        if row["layout"] == "optimus2d" and "kernels" in row["weights"]
    )
    peaks = {(row["devices"], row["layout"]): row["peak, MiB"] for row in tables.get("memory", ())}
    # One device has no layout
    below = all(peaks[number, "optimus2d"] < peaks[number, "megatron1d"] for number, _ in peaks if number > 1)
    return counted and spread and below


def draw(tables, path):
    """Draw memory, largest batch and scalars sent, those that there are, as PNG."""
    from benchmarks.pictures import new_figure, save_picture

    columns = {
        "memory": ("peak, MiB", "Memory of a device, MiB"),
        "batch": ("largest batch", "Largest batch"),
    }
    drawn = [name for name in (*columns, "crossover") if name in tables] or ["crossover"]
    figure, (all_axes,) = new_figure(len(drawn))
    for name, axes in zip(drawn, all_axes, strict=True):
        rows = tables.get(name, [])
        if name in columns:
            column, title = columns[name]
            _draw_layouts(axes, rows, column)
            axes.set(title=title, xlabel="devices")
            continue
        numbers = [row["devices"] for row in rows]
        axes.axhline(1, color="C1", label="megatron1d")
        for transport, color in TRANSPORTS.items():
            sent = [row[f"{transport} / 1D"] for row in rows]
            axes.plot(numbers, sent, "o-", color=color, label=f"optimus2d, {transport}")
        axes.set(title="Sent in a step, of 1D", xlabel="devices", xscale="log", ylim=(0, None))
        axes.legend()
    save_picture(figure, path)


def _draw_layouts(axes, rows, column):
    """Bars of both layouts beside each other, for each number of devices."""
    from benchmarks.pictures import draw_bars

    values = {(row["devices"], row["layout"]): row[column] for row in rows}
    numbers = sorted({row["devices"] for row in rows if row["layout"] == "optimus2d"})
    layouts = {layout: layout for layout in ("megatron1d", "optimus2d")}
    groups = [{"devices": number, **{one: values[number, one] for one in layouts}} for number in numbers]
    draw_bars(axes, groups, "devices", layouts, horizontal=False)


if __name__ == "__main__":
    sys.exit(run(main, ParallelismConfig))
