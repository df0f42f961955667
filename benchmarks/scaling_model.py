"""Scaling of 1D and 2D layouts, as arithmetic from the scalars that their programs send.

Sections 3.1.2 and 5 of "An Efficient 2D Method for Training Super-Large Deep Learning Models":

    time of a pass = multiplications / p / rate  +  scalars that a device sends x seconds a scalar

Multiplications are those of Table 1, scalars those of `communication_volume`, which compiled programs send
to the last one. Rate and seconds a scalar are of the machine, and the paper prints neither: they are fitted
to one printed row. Nothing else is in the model: no latency, no overlap, and every device sends at the same
speed, though four of the paper's share a node.
"""

import dataclasses
import math

from scipy import optimize

from benchmarks.communication_volume import SCALAR_BYTES, formula
from benchmarks.encoder_program import EncoderShape

LAYERS, LENGTH = 24, 512  # of Tables 2 and 3
KEPT, AGAIN = "backward, all kept", "backward, whole block again"  # of `PASSES`
SCHEMES = {"megatron1d": ("megatron1d", ""), "tree": ("optimus2d", "tree"), "gather": ("optimus2d", "gather")}
MANY_DEVICES = (4, 16, 64, 256, 1024)
WANTED_EFFICIENCY = 0.5  # of isoefficiency
WIDEST = 1e12  # h at which every scheme is busy
HIDDEN_PER_BATCH = 64 / 3  # h / b of Optimus in Table 2: 2048 / 96


@dataclasses.dataclass(frozen=True)
class Printed:
    """A row of Table 2 or 3: seconds are of a sequence, throughput is sequences a second in training."""

    devices: int
    batch: int
    width: int
    forward: float
    backward: float
    throughput: float


# Pairs of Megatron and Optimus
TABLE_2 = (
    (Printed(4, 60, 2048, 0.0793, 0.2613, 2.9363), Printed(4, 96, 2048, 0.0985, 0.2979, 2.5229)),
    (Printed(16, 60, 4096, 0.2081, 0.5149, 1.3831), Printed(16, 192, 4096, 0.1764, 0.5312, 1.4134)),
    (Printed(36, 40, 6120, 0.3379, 0.7955, 0.8823), Printed(36, 288, 6120, 0.1901, 0.5759, 1.3055)),
    (Printed(64, 30, 8192, 0.4638, 1.0963, 0.6410), Printed(64, 384, 8192, 0.2589, 0.7935, 0.9502)),
)
# Two rows are not consistent in print: 1.8180 is the throughput of a backward time of 0.4306, and 1.4095 not
# that of 0.1950 + 0.5704
TABLE_3 = (
    (Printed(4, 12, 3072, 0.1225, 0.4749, 1.6737), Printed(4, 24, 3072, 0.1888, 0.5691, 1.3195)),
    (Printed(16, 12, 3072, 0.1143, 0.4293, 1.8397), Printed(16, 24, 3072, 0.1950, 0.5704, 1.4095)),
    (Printed(36, 12, 3096, 0.1212, 0.4512, 1.7470), Printed(36, 24, 3072, 0.1625, 0.4764, 1.5653)),
    (Printed(64, 12, 3072, 0.1195, 0.5306, 1.8180), Printed(64, 24, 3072, 0.1253, 0.3716, 2.0123)),
)
FITTED_TO, _ = TABLE_2[-1]  # Megatron on 64


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine in the model: multiplications, each with its addition, a second; seconds to send a scalar."""

    rate: float
    seconds_per_scalar: float

    def seconds(self, multiplications, scalars):
        """Time of a pass, of what one device computes and sends."""
        return multiplications / self.rate + scalars * self.seconds_per_scalar


def multiplications(shape):
    """Of scalars, in the forward pass of all blocks on all devices, by Table 1."""
    b, s, h = shape.batch, shape.length, shape.width
    return shape.num_layers * (12 * b * s * h**2 + 2 * b * s**2 * h)


def fit_machine(row=FITTED_TO):
    """The machine under which a row of Megatron has its two printed times: `Machine`."""
    shape = _shape_of_row(row)
    # Backward, three times the multiplications of forward and two times its scalars: their difference is one
    # time the multiplications, and no scalars
    computing = row.backward - 2 * row.forward
    sent = float(formula("forward", "megatron1d", "", math.isqrt(row.devices), shape)) / row.batch
    rate = multiplications(shape) / row.batch / row.devices / computing
    return Machine(rate, (row.forward - computing) / sent)


def seconds_a_sequence(scheme, shape, devices, machine):
    """Seconds forward and backward of one sequence under a scheme, of `SCHEMES`, with checkpointing."""
    work, side = multiplications(shape) / devices, math.isqrt(devices)
    times = []
    for name, rounds in (("forward", 1), (AGAIN, 3)):
        sent = float(formula(name, *SCHEMES[scheme], side, shape))
        times.append(machine.seconds(rounds * work, sent) / shape.batch)
    return times


def efficiency(scheme, shape, devices, machine):
    """Serial time over p times the time on p devices, forward and backward; 0 to 1."""
    serial = 4 * multiplications(shape) / machine.rate / shape.batch
    return serial / devices / sum(seconds_a_sequence(scheme, shape, devices, machine))


def scaling_rows(printed, machine):
    """Tables 2 or 3 beside the model: list of dicts for a table, a row for each number of devices.

    `training` and `inference` are sequences a second of 2D over those of 1D, by the paper's clock and by the
    model, for the paper's broadcasts (tree) and for those of the default transport (gather).
    """
    rows = []
    for one, two in printed:
        devices, shape = one.devices, _shape_of_row(two)
        flat = seconds_a_sequence("megatron1d", _shape_of_row(one), devices, machine)
        row = {"devices": devices, "hidden": two.width, "batch 1D": one.batch, "batch 2D": two.batch}
        row["training, printed"] = two.throughput / one.throughput
        found = {name: seconds_a_sequence(name, shape, devices, machine) for name in ("tree", "gather")}
        row |= {f"training, {name}": sum(flat) / sum(times) for name, times in found.items()}
        row["inference, printed"] = one.forward / two.forward
        row |= {f"inference, {name}": flat[0] / times[0] for name, times in found.items()}
        rows.append(row)
    return rows


def scaling_tables(machine):
    """All tables of the model: dict from name to rows."""
    constants = {
        "fitted to": f"Table 2, Megatron on {FITTED_TO.devices}",
        "multiplications/s of a device": machine.rate,
        "seconds per scalar sent": machine.seconds_per_scalar,
        "GB/s": SCALAR_BYTES / machine.seconds_per_scalar / 1e9,
    }
    return {
        "constants": [constants],
        "weak scaling, 2D over 1D": scaling_rows(TABLE_2, machine),
        "strong scaling, 2D over 1D": scaling_rows(TABLE_3, machine),
        "crossover": crossover_rows(MANY_DEVICES),
        f"isoefficiency at {WANTED_EFFICIENCY:g}": isoefficiency_rows(
            MANY_DEVICES, machine, WANTED_EFFICIENCY
        ),
    }


def isoefficiency_rows(all_devices, machine, wanted):
    """Sizes of problems that keep their devices busy: list of dicts for a table.

    As Section 3.1.2 has it, b grows with h, here as in Table 2, and s and N stay. `W` is the multiplications
    of a step; it grows from one row to the next as an isoefficiency function: p^3 for 1D, (sqrt(p) log p)^3
    for the tree.
    """
    rows = []
    for devices in all_devices:
        row = {"devices": devices}
        for scheme in SCHEMES:
            width = _width_for(scheme, devices, machine, wanted)
            row[f"hidden, {scheme}"] = round(width)
            row[f"W, {scheme}"] = 4 * multiplications(_shape_of(width, devices))
        rows.append(row)
    return rows


def crossover_rows(all_devices):
    """Scalars a device sends in a training step, of 1D and of 2D in units of 1D, at Table 2's weak scaling.

    No constant of a machine is in it. List of dicts for a table.
    """
    rows = []
    for devices in all_devices:
        side = math.isqrt(devices)
        shape = _shape_of(1024 * side, devices)
        sent = {
            scheme: sum(float(formula(name, *key, side, shape)) for name in ("forward", AGAIN))
            for scheme, key in SCHEMES.items()
        }
        row = {"devices": devices, "hidden": shape.width, "1D, scalars": sent["megatron1d"]}
        rows.append(row | {f"{name} / 1D": sent[name] / sent["megatron1d"] for name in ("tree", "gather")})
    return rows


def _shape_of_row(row):
    return EncoderShape(row.batch, LENGTH, row.width, row.devices, LAYERS)


def _shape_of(width, devices):
    """As Table 2 scales; the batch need not be a whole number."""
    return EncoderShape(width / HIDDEN_PER_BATCH, LENGTH, width, devices, LAYERS)


def _width_for(scheme, devices, machine, wanted):
    """h at which the efficiency, which grows with h, is as wanted."""

    def missing(width):
        return efficiency(scheme, _shape_of(width, devices), devices, machine) - wanted

    return optimize.brentq(missing, 1.0, WIDEST)
