"""Scores and speed of packed fine-tuning runs against the same runs unpacked.

python -m benchmarks.finetuning --packed='my/packed-*' --unpacked='my/unpacked-*'
"""

import dataclasses
import glob
import statistics
import sys
from pathlib import Path

from benchmarks.runner import Settings, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json
from bert_packed.training.engines import choose_backend

DEPTH = "max_sequences_per_pack"
# Neither scores nor the time of a step depend on these flags, beside those that are compared
MAY_DIFFER = (
    *("output_dir", "json", "overwrite", "random_seed", DEPTH),
    *("log_steps", "save_checkpoints_steps", "keep_checkpoint_max", "predict_batch_size"),
)
SPEED = "sequences_per_second"


@dataclasses.dataclass(frozen=True)
class ComparisonConfig(Settings):
    """Compares the output directories of bert-packed squad, glue or ner that differ in
    --random_seed and in --max_sequences_per_pack only: of each score the mean, the least and the most
    over the runs, and the wall time of a training step, packed / unpacked.

    The time of a step is the median of the rows of all runs of a kind: measure on a machine that does
    little else, or interleave the runs.
    """

    packed: str = setting("", "output directories of packed runs, a pattern", required=True)
    unpacked: str = setting("", "output directories of the unpacked runs, a pattern", required=True)


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """Results that a run left in its output directory."""

    folder: Path
    flags: dict
    settings: dict  # what runs must share: flags but `MAY_DIFFER`, what it read and ran on, names of scores
    packing_factor: float | None  # None where the run does not say
    scores: dict
    speeds: list[float]  # sequences per second, one a row of the training log


def main(config):
    """Read the runs, check that they compare, print and write."""
    choose_backend()
    packed, unpacked = (read_runs(name, getattr(config, name)) for name in ("packed", "unpacked"))
    check_comparable(packed, unpacked)
    rows = [
        {"score": score, **_spread("packed", packed, score), **_spread("unpacked", unpacked, score)}
        for score in packed[0].scores
    ]
    show("finetuning", config, {"scores": rows, "speed": [speed_row(packed, unpacked)]})


def speed_row(packed, unpacked):
    """Speed of lists of `FinishedRun`: a row of a table."""
    # Medians are taken, since rows of a log while the machine was busy weigh on a mean
    fast, slow = (statistics.median(s for one in runs for s in one.speeds) for runs in (packed, unpacked))
    factors = [one.packing_factor for one in packed if one.packing_factor]
    return {
        "seeds": len(packed),
        "packing factor": statistics.fmean(factors) if factors else None,
        "packed, sequences/s": fast,
        "unpacked, sequences/s": slow,
        "time of a step, packed / unpacked": slow / fast,
    }


def read_runs(argument, pattern):
    """The runs of a pattern, sorted: list of `FinishedRun`; raises `InputError`."""
    folders = [Path(path) for path in sorted(glob.glob(pattern)) if Path(path).is_dir()]
    if not folders:
        raise InputError(f"`{argument}` must match output directories. Received: {pattern}.")
    return [_read_run(argument, folder) for folder in folders]


def check_comparable(packed, unpacked):
    """Raise `InputError` unless the depths are as named, and the runs differ in `MAY_DIFFER` only."""
    for argument, runs in (("packed", packed), ("unpacked", unpacked)):
        for one in runs:
            depth = one.flags.get(DEPTH)
            if (depth == 1) != (argument == "unpacked"):
                rule = "1" if argument == "unpacked" else "more than 1"
                raise InputError(
                    f"`{argument}` must match runs whose {DEPTH} is {rule}. Received: {one.folder}, "
                    f"of {depth!r}."
                )
    seeds = [sorted(one.flags["random_seed"] for one in runs) for runs in (packed, unpacked)]
    if seeds[0] != seeds[1]:
        raise InputError(
            f"`unpacked` must match runs of the random_seed of `packed`, {seeds[0]}. Received: {seeds[1]}."
        )
    first = packed[0]
    for other in [*packed[1:], *unpacked]:
        for name in sorted(first.settings.keys() | other.settings.keys()):
            want, got = (one.settings.get(name) for one in (first, other))
            if got != want:
                raise InputError(
                    f"{other.folder}: `{name}` must be that of {first.folder}, {want!r}. Received: {got!r}."
                )


def _spread(kind, runs, score):
    """Mean, least and most of a score over runs, as columns of a table."""
    values = [one.scores[score] for one in runs]
    return {kind: statistics.fmean(values), f"{kind}, least": min(values), f"{kind}, most": max(values)}


def _read_run(argument, folder):
    # These import TensorBoard and Keras, which --help need not wait for
    from bert_packed.runs.run_directory import RUN_FILE, SCORES_FILE
    from bert_packed.training.metrics_log import read_rows

    try:
        record, scores = (read_json(folder / name) for name in (RUN_FILE, SCORES_FILE))
        flags = {**record["flags"], "random_seed": int(record["flags"]["random_seed"])}
        settings = {name: value for name, value in flags.items() if name not in MAY_DIFFER}
        settings["inputs"] = {
            name: [entry["sha256"] for entry in files] for name, files in record["inputs"].items()
        }
        settings["backends"] = sorted({segment["backend"] for segment in record["segments"]})
        settings["scores"] = list(scores)
        speeds = [float(row[SPEED]) for row in read_rows(folder / "metrics.csv") if row[SPEED]]
        if not speeds:
            raise ValueError(f"metrics.csv without {SPEED}")
        return FinishedRun(
            folder=folder,
            flags=flags,
            settings=settings,
            packing_factor=record.get("packing_factor"),
            scores={name: float(value) for name, value in scores.items()},
            speeds=speeds,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"`{argument}` must match output directories of fine-tunings that were scored. Received: "
            f"{folder}, {error!r}."
        ) from error


if __name__ == "__main__":
    sys.exit(run(main, ComparisonConfig))
