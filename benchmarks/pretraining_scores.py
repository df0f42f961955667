"""What pre-trainings and their fine-tunings have come to: sequences, hours, held-out accuracy, scores.

Of a phase those seeds count that have come as far as any: one that has just begun says nothing of the end.
"""

import statistics

from benchmarks.pretraining_stages import KINDS, PHASES

SCORES = {"F1": "f1", "exact match": "exact_match"}


def summary_rows(runs, points, scores):
    """What each kind has come to: rows of a table, one for packed, unpacked and random.

    Args:
        runs: Of `make_runs`.
        points: Of `curve_tables.read_points`, of the phases.
        scores: Dict from the name of a SQuAD run that is complete to its scores.
    """
    rows = []
    for kind in KINDS:
        of_kind = [run for run in runs if run.variant.startswith((f"squad-{kind}", *_phases_of(kind)))]
        if not of_kind:
            continue
        row = {"pre-training": kind}
        for phase in PHASES:
            last = _last_points(points, f"{phase}-{kind}")
            row[f"{phase} seeds"] = len(last["eval"])
            row |= {
                f"{phase} {name}": statistics.fmean(values) if values else None
                for name, values in (
                    ("sequences", [point["sequences"] for point in last["eval"]]),
                    ("hours", [point["hours"] for point in last["train"] if point["hours"]]),
                    ("held-out accuracy", [point["mlm_accuracy"] for point in last["eval"]]),
                )
            }
        finished = [scores[run.name] for run in of_kind if run.name in scores]
        row |= {"fine-tunings": len(finished)}
        for title, key in SCORES.items():
            values = [one[key] for one in finished]
            row |= {
                f"{title}, median": statistics.median(values) if values else None,
                f"{title}, least": min(values, default=None),
                f"{title}, most": max(values, default=None),
            }
        rows.append(row)
    return rows


def _phases_of(kind):
    return [f"{phase}-{kind}" for phase in PHASES]


def _last_points(points, variant):
    """The newest points of the seeds that have come as far as any: dict from `train` or `eval` to a list."""
    last = {}
    for data in ("train", "eval"):
        own = [point for point in points if (point["variant"], point["data"]) == (variant, data)]
        most = max((point["sequences"] for point in own), default=None)
        last[data] = [point for point in own if point["sequences"] == most]
    return last
