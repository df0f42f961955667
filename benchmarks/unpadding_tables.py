"""The tables of the report on un-padding: beside print, and over numbers of devices."""

import numpy as np

from benchmarks import gumbel

PRINTED_SPEED_UP = 1.913  # of packing, Table 1
PRINTED = {  # of Section 4.4 and Section E
    "mode of one device": 1.94,
    "beta of one device": 0.108,
    "gain on 32 devices, %": 50.0,
    "gain on 2048 devices, %": 30.0,
}


def beside_print(one):
    """What the paper prints of its estimate, and ours: rows of a table."""
    ours = {
        "mode of one device": one.alpha,
        "beta of one device": one.beta,
        **{
            f"gain on {number} devices, %": 100 * (gumbel.expected_least(one, number) - 1)
            for number in (32, 2048)
        },
    }
    slip = gumbel.Gumbel(PRINTED["mode of one device"], PRINTED["beta of one device"])
    with_slip = {
        f"gain on {number} devices, %": 100 * (gumbel.expected_least(slip, number) - 1)
        for number in (32, 2048)
    }
    return [
        {"figure": name, "print": PRINTED[name], "ours": value, "with the printed beta": with_slip.get(name)}
        for name, value in ours.items()
    ]


def printed_scaling(one, devices):
    """Speed-ups over padding with the paper's constants: rows of a table, one for each number of devices."""
    rows = []
    for number in devices:
        expected = gumbel.expected_least(one, number)
        rows.append(
            {
                "devices": number,
                "un-padding": expected,
                "packing": PRINTED_SPEED_UP,
                "packing / un-padding": PRINTED_SPEED_UP / expected,
            }
        )
    return rows


def measured_scaling(times, own, devices):
    """Speed-ups over padding with our own batch times: rows of a table.

    As in the paper un-padding follows its Gumbel distribution and packs take their median time everywhere.
    `seen` has both as the mean of the least of n of the batches seen: the clock's noise weighs on both alike.

    Args:
        times: `unpadded_times.Times`.
        own: `Gumbel` fitted to its speed-ups.
        devices: Numbers of devices.
    """
    packing = float(np.median(times.packing_speed_ups))
    rows = []
    for number in devices:
        expected = gumbel.expected_least(own, number)
        seen, packing_seen = (
            gumbel.expected_least_of_values(values, number)
            for values in (times.speed_ups, times.packing_speed_ups)
        )
        rows.append(
            {
                "devices": number,
                "un-padding": expected,
                "packing": packing,
                "packing / un-padding": packing / expected,
                "un-padding, seen": seen,
                "packing, seen": packing_seen,
                "packing / un-padding, seen": packing_seen / seen,
            }
        )
    return rows


def describe_times(times, own):
    """What was measured of one device: a row of a table."""
    speed_ups = times.speed_ups
    return {
        "batches": len(speed_ups),
        "padded, s": float(np.median(times.padded)),
        "unpadded, s": float(np.median(times.unpadded)),
        "packed, s": float(np.median(times.packed)),
        "packing factor": times.packing_factor,
        "alpha": own.alpha,
        "beta": own.beta,
        "least": min(speed_ups),
        "mean": float(np.mean(speed_ups)),
        "largest": max(speed_ups),
    }
