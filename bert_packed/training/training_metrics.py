"""Figures of a row of the training log: means, throughput and utilisation since the last row."""

import dataclasses

from bert_packed.core.progress import describe_duration
from bert_packed.objectives.objective import add_sums

# Figures of a step beside its sums; a row has the mean over its steps
STEP_FIGURES = ("gradient_norm", "trust_ratio_min", "trust_ratio_median", "trust_ratio_max")
TIMED_FIGURES = ("data_wait_share", "model_flop_utilisation")  # by the clock: no two runs have the same
WATCHED = (*STEP_FIGURES, "packing_efficiency", *TIMED_FIGURES)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Denominators of relative figures; a figure whose denominator is None has no value.

    Attributes:
        positions_per_step: Packs per step times pack length.
        model_flops: Function from sums over steps to the model's floating-point operations for them.
        peak_flops: Operations per second of all devices of the run together, in matrix products.
    """

    positions_per_step: int | None = None
    model_flops: object = None
    peak_flops: float | None = None


@dataclasses.dataclass
class LogInterval:
    """Sums over the steps since the last row of the log; checkpoints save the first three.

    Attributes:
        sums: Sums over the steps that were not skipped.
        num_skipped: Number of skipped steps.
        watched: Sums of `STEP_FIGURES`, steps and tokens.
        timed: Sums over the steps that this process timed.
        seconds, waiting: Time of these steps, and the part spent waiting for a batch.
    """

    sums: dict = dataclasses.field(default_factory=dict)
    num_skipped: int = 0
    watched: dict = dataclasses.field(default_factory=dict)
    scale: Scale = dataclasses.field(default_factory=Scale)
    timed: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    waiting: float = 0.0

    @classmethod
    def from_state(cls, state, scale):
        """Restore the interval in which a checkpoint was saved."""
        # Older versions saved less, hence `get`
        return cls(
            dict(state["interval"]), state.get("num_skipped", 0), dict(state.get("watched", {})), scale
        )

    def state(self):
        """The interval as entries of a checkpoint's state, for `from_state`."""
        return {"interval": self.sums, "num_skipped": self.num_skipped, "watched": dict(self.watched)}

    def add(self, sums, seconds, waiting=0.0):
        """Add a step that was not skipped.

        Args:
            sums: Dict of finite floats, the engine's.
            seconds: Duration, waiting included; None for the first step of a process, which compiles.
            waiting: Seconds of these until there was a batch.
        """
        figures = {name: sums[name] for name in STEP_FIGURES if name in sums}
        self.watched = add_sums(self.watched, {**figures, "num_steps": 1.0, "num_tokens": sums["num_tokens"]})
        self.sums = add_sums(self.sums, {name: sums[name] for name in sums if name not in STEP_FIGURES})
        if seconds is not None:
            self.seconds += seconds
            self.waiting += waiting
            self.timed = add_sums(self.timed, sums)

    def row(self, step, means, learning_rate):
        """The row of the log that ends the interval at `step`: dict, None for unknown figures."""
        figures = means(self.sums) if self.sums else {}  # none where every step was left out
        return {
            "step": step,
            **figures,
            "skipped_steps": self.num_skipped,
            "learning_rate": learning_rate,
            "sequences_per_second": self._per_second("num_sequences"),
            "tokens_per_second": self._per_second("num_tokens"),
            **self._watched_figures(),
        }

    def _per_second(self, name):
        return self.timed[name] / self.seconds if self.seconds > 0 else None

    def _watched_figures(self):
        watched, scale = self.watched, self.scale
        num_steps = watched.get("num_steps", 0.0)
        positions = (scale.positions_per_step or 0) * num_steps
        is_timed = self.seconds > 0
        utilisation = None
        if is_timed and scale.model_flops and scale.peak_flops:
            utilisation = scale.model_flops(self.timed) / self.seconds / scale.peak_flops
        return {
            **{name: watched[name] / num_steps if name in watched else None for name in STEP_FIGURES},
            "packing_efficiency": watched["num_tokens"] / positions if positions else None,
            "data_wait_share": self.waiting / self.seconds if is_timed else None,
            "model_flop_utilisation": utilisation,
        }


def describe(row, seconds_left=None):
    """A row as at most 75 columns of a line: "loss 2.345, mlm accuracy 51.2%, 12,345 tokens/s, 1.2 h left".

    It has the first accuracy of the objective, and how many steps were left out, if any were.
    """
    parts = [f"loss {row['loss']:.4g}" if "loss" in row else "no loss"]
    accuracies = [name for name in row if name.endswith("accuracy")]
    parts += [f"{name.replace('_', ' ')} {row[name]:.1%}" for name in accuracies[:1]]
    if rate := row["tokens_per_second"]:
        parts.append(f"{rate:,.0f} tokens/s" if rate < 1e6 else f"{rate / 1e6:.3g}M tokens/s")
    if seconds_left:
        parts.append(f"{describe_duration(seconds_left)} left")
    if row["skipped_steps"]:
        parts.append(f"{row['skipped_steps']} skipped")
    return ", ".join(parts)
