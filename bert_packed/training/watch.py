"""What people watch of a training that is under way, from sums, counts and seconds."""

import dataclasses

# What a step says of itself beside its sums; a row of the log has the mean over its steps
STEP_FIGURES = ("gradient_norm", "trust_ratio_min", "trust_ratio_median", "trust_ratio_max")
TIMED_FIGURES = ("data_wait_share", "model_flop_utilisation")  # of a clock: no two runs have the same
WATCHED = (*STEP_FIGURES, "packing_efficiency", *TIMED_FIGURES)


@dataclasses.dataclass(frozen=True)
class Scale:
    """What a run is measured against; None where that is not known, and the figure then has no value.

    Attributes:
        positions_per_step: Places for tokens in the packs of a step: packs times their length.
        model_flops: Function from sums over steps to the operations that a model needs for them.
        peak_flops: Operations a second that all devices of the run reach together in matrix products.
    """

    positions_per_step: int | None = None
    model_flops: object = None
    peak_flops: float | None = None


@dataclasses.dataclass
class Watch:
    """What has been seen since the last row of the log.

    Attributes:
        scale: `Scale`.
        totals: Sums over the interval's steps: figures, steps, tokens. Saved with a checkpoint, so that the
            next row is the same.
        seconds, waiting: Time of the steps that this process timed, and what of it went by until there was a
            batch.
        work: Sums over the timed steps.
    """

    scale: Scale = dataclasses.field(default_factory=Scale)
    totals: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    waiting: float = 0.0
    work: dict = dataclasses.field(default_factory=dict)

    def add(self, sums, seconds, waiting):
        """Add a step that was taken, and so is finite.

        Args:
            sums: Dict of floats: what the engine returned.
            seconds: Of the step, with waiting; None for the first of a process, which holds the compilation.
            waiting: Seconds of these until there was a batch.
        """
        figures = {name: sums[name] for name in STEP_FIGURES if name in sums}
        _add(self.totals, {**figures, "num_steps": 1.0, "num_tokens": sums["num_tokens"]})
        if seconds is not None:
            self.seconds += seconds
            self.waiting += waiting
            _add(self.work, sums)

    def row(self):
        """The figures of a row of the log, `WATCHED`: dict of floats, None for what is not known."""
        totals, scale = self.totals, self.scale
        num_steps = totals.get("num_steps", 0.0)
        figures = {name: totals[name] / num_steps if name in totals else None for name in STEP_FIGURES}
        positions = (scale.positions_per_step or 0) * num_steps
        is_timed = self.seconds > 0
        utilisation = None
        if is_timed and scale.model_flops and scale.peak_flops:
            utilisation = scale.model_flops(self.work) / self.seconds / scale.peak_flops
        return {
            **figures,
            "packing_efficiency": totals["num_tokens"] / positions if positions else None,
            "data_wait_share": self.waiting / self.seconds if is_timed else None,
            "model_flop_utilisation": utilisation,
        }


def describe(row):
    """The watched figures of a row for the progress bar: " |g| 0.52 ratio 0.01/0.2/3.1 ...", "" for none."""
    parts = []
    if row.get("gradient_norm") is not None:
        parts.append(f"|g| {row['gradient_norm']:.3g}")
    if row.get("trust_ratio_min") is not None:
        ratios = [row[f"trust_ratio_{name}"] for name in ("min", "median", "max")]
        parts.append("trust " + "/".join(f"{ratio:.2g}" for ratio in ratios))
    names = {"packing_efficiency": "packed", "data_wait_share": "wait", "model_flop_utilisation": "MFU"}
    parts += [f"{short} {row[name]:.1%}" for name, short in names.items() if row.get(name) is not None]
    return "".join(f" {part}" for part in parts)


def _add(totals, values):
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value
