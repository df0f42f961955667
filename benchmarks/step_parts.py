"""A training step and its parts, timed in turns, beside the least that each could take on this machine."""

import dataclasses
import statistics

from benchmarks.benchmark_batches import make_batches
from benchmarks.benchmark_engine import build_engine
from benchmarks.machine_parts import Part, make_parts, optimizer_part
from benchmarks.machine_rates import GIGA, Rates, measure_rates
from bert_packed.runs.interleaved_timing import time_interleaved

MILLI = 1e3
STEP = "step"
FEWEST_ROWS = 256  # of a product that is measured by itself; of fewer, a call costs more than the product


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a machine was found to need.

    Attributes:
        parts: List of `Part`; `times` are of the whole step.
        seconds: Dict from a part's name to seconds, one a turn, each of one time.
        step: Seconds of whole steps.
        rates: `Rates`; None where only the step was measured.
    """

    parts: list[Part]
    seconds: dict[str, list[float]]
    step: list[float]
    rates: Rates | None

    def product_bound(self):
        """Seconds of the step's products at the machine's best rate."""
        return sum(part.times * part.flops for part in self.parts) / GIGA / self.rates.products


def measure_step(config, model_config, folder):
    """Measure as the command `machine` asks.

    Args:
        config: `machine.MachineConfig`.
        model_config: `ModelConfig`.
        folder: Existing folder for records.

    Returns:
        `Measured`.
    """
    packed, _ = make_batches(
        folder,
        "",
        config.max_seq_length,
        config.max_sequences_per_pack,
        config.batch_size,
        1,
        model_config,
    )
    batch = packed.batches[0]
    micro = config.micro_batch_size or config.batch_size
    engine = build_engine(model_config, micro_batch_size=micro)

    def step(_):
        float(engine.train_step(batch)["num_sequences"])  # wait for the device

    if config.step_only:
        return Measured([], {}, time_interleaved({STEP: step}, config.repeats)[STEP], None)
    part_of_batch = {name: values[:micro] for name, values in batch.items()}
    parts = [
        dataclasses.replace(part, times=part.times * (config.batch_size // micro))
        for part in make_parts(model_config, part_of_batch, batch["prediction_ids"].shape[1])
    ]
    # Its own engine: what the optimizer takes, the step may have given away
    parts.append(optimizer_part(build_engine(model_config)))
    seconds = time_interleaved({STEP: step, **{part.name: part.run for part in parts}}, config.repeats)
    shapes = {part.product for part in parts if part.product and part.product[0] >= FEWEST_ROWS}
    return Measured(
        parts,
        seconds,
        seconds.pop(STEP),
        measure_rates(shapes, config.repeats, config.reference),
    )


def bounds(part, rates):
    """The least seconds that a part could take, by what it needs: dict from the name of a rate."""
    return {
        "products": part.flops / GIGA / rates.products,
        "memory": part.num_bytes / GIGA / rates.bandwidth,
        "exponentials": part.exponentials / GIGA / rates.exponentials,
    }


def part_rows(measured):
    """A row for each part, for their sum and for the whole step.

    Returns:
        List of dicts: `part`, `times` a step, `ms` of a step (medians), `share` of the sum of all parts,
        `GFLOP/s` and `operations a byte` of its products, the least `ms by its bound`, what it is `limited
        by`, and the bound as a share of the time, `reached`.
    """
    spent = {
        part.name: part.times * statistics.median(measured.seconds[part.name]) for part in measured.parts
    }
    whole, rows = sum(spent.values()), []
    for part in measured.parts:
        limits = bounds(part, measured.rates)
        limit = max(limits, key=limits.get)
        work = part.times * part.flops, part.times * part.num_bytes
        rows.append(
            _row(part.name, part.times, spent[part.name], whole, work, part.times * limits[limit], limit)
        )
    flops = sum(part.times * part.flops for part in measured.parts)
    least = sum(part.times * max(bounds(part, measured.rates).values()) for part in measured.parts)
    work = flops, sum(part.times * part.num_bytes for part in measured.parts)
    return [
        *rows,
        _row("all parts", None, whole, whole, work, least, None),
        _row("whole step", None, statistics.median(measured.step), whole, work, least, None),
    ]


def _row(name, times, seconds, whole, work, least, limit):
    flops, num_bytes = work
    return {
        "part": name,
        "times": times,
        "ms": MILLI * seconds,
        "share": seconds / whole,
        "GFLOP/s": flops / GIGA / seconds if flops else None,
        "operations a byte": flops / num_bytes if flops else None,
        "ms by its bound": MILLI * least,
        "limited by": limit,
        "reached": least / seconds,
    }


def rate_rows(measured):
    """The machine's rates, as a table.

    Returns:
        List of dicts: `what`, `here`, `unit`, `torch`'s rate, ours as a share `of torch's` in neighbouring
        turns, the median, and `from` and `to`, its interval (95 %); the last four None where not measured.
    """
    columns = "torch", "of torch's", "from", "to"
    rates, rows = measured.rates, []
    for shape, rate in rates.by_shape.items():
        theirs = rates.torch.get(shape), *rates.of_torch.get(shape, (None, None, None))
        row = {"what": f"product {shape}", "here": rate, "unit": "GFLOP/s"}
        rows.append(row | dict(zip(columns, theirs, strict=True)))
    for what, here, unit in (
        ("memory, two arrays read and one written", rates.bandwidth, "GB/s"),
        ("exponentials", rates.exponentials, "1e9/s"),
    ):
        rows.append({"what": what, "here": here, "unit": unit, **dict.fromkeys(columns)})
    return rows
