"""What of a set of runs is there: which are complete, which are another config's, which are outdated.

A run is outdated when the checkpoint that it began from has been replaced since, or is outdated itself.
"""

import dataclasses
from pathlib import Path

from benchmarks.changed_inputs import checksum, find_changed_input
from benchmarks.planned_runs import SQUAD, settings_of
from benchmarks.run_curves import LOGS
from benchmarks.run_json import kept_flags, read_object
from bert_packed.core.output_files import write_json
from bert_packed.core.settings import result_settings

# Changeable for a training, of which the scores are another result
SCORING = ("predict_file", "n_best_size", "max_answer_length", "null_score_diff_threshold")
# Where points lie on a curve is no part of what the curve is
INTERVALS = ("log_steps", "eval_steps")


def is_complete(run, folder):
    """Whether a run has taken, logged and evaluated its last step, by the flags, start and files of today.

    Args:
        run: `planned_runs.Run`.
        folder: DIR.

    Raises:
        InputError: a flag of the run is wrong.
    """
    from bert_packed.runs.run_directory import SCORES_FILE
    from bert_packed.training.metrics_log import read_rows

    wanted = settings_of(run, folder)
    output_dir = Path(wanted.output_dir)
    if kept_flags(output_dir) is None or _other_flags(run, folder) or is_outdated(output_dir):
        return False
    if find_changed_file(run, folder):
        return False
    if run.program == SQUAD:
        scored_at = _modified(output_dir / SCORES_FILE)  # written last
        return scored_at is not None and scored_at != _read_note(run, folder).get("scored_before")
    steps = [[int(row["step"]) for row in read_rows(output_dir / log)] for log in LOGS.values()]
    return all(of_log and of_log[-1] == wanted.num_train_steps for of_log in steps)


def comparable(runs, folder, tell):
    """Of some runs those that are there as they are wanted now, or have not begun.

    Args:
        runs: List of `planned_runs.Run`.
        folder: DIR.
        tell: Called with a line about each that is left out.

    Raises:
        InputError: a flag of one of them is wrong.
    """
    found = []
    for run in runs:
        output_dir = Path(folder) / run.name
        other = _other_flags(run, folder)
        if other:
            theirs = ", ".join(f"{name}={value}" for name, value in other.items())
            tell(f"{run.name} is left out: its run.json has {theirs}")
        elif is_outdated(output_dir):
            tell(f"{run.name} is left out: what it began from was taken anew since")
        elif changed := find_changed_file(run, folder):
            tell(f"{run.name} is left out: {changed} is not what it was when the run was made")
        else:
            found.append(run)
    return found


def as_begun(run, folder):
    """A run with what its command would refuse to change in one that has begun, though it means the same.

    That is how often it logs and evaluates, and the path by which its start is named.
    """
    kept = kept_flags(Path(folder) / run.name) or {}
    flags = dict(run.flags)
    for name in INTERVALS:
        if name in flags:
            flags[name] = kept.get(name, flags[name])
    start = kept.get("init_checkpoint")
    if flags.get("init_checkpoint") and start and _is_same_path(start, flags["init_checkpoint"]):
        flags["init_checkpoint"] = start
    return dataclasses.replace(run, flags=flags)


def find_outdated(runs, folder):
    """Names of the runs that their commands would go on with though their start is, or will be, another.

    Args:
        runs: List of `planned_runs.Run`, each after the one that it starts from.
        folder: DIR.
    """
    from bert_packed.checkpoints.checkpoint import list_checkpoints

    renewed, names = set(), []
    for run in runs:
        output_dir = Path(folder) / run.name
        start = run.flags.get("init_checkpoint")
        from_renewed = bool(start) and Path(start).resolve() in renewed
        if list_checkpoints(output_dir):
            if not from_renewed and not is_outdated(output_dir):
                continue
            names.append(run.name)
        elif is_complete(run, folder):
            continue
        renewed.add(output_dir.resolve())
    return names


def is_outdated(output_dir):
    """Whether a run began before the newest checkpoint of its start was written, or its start did so."""
    from bert_packed.checkpoints.checkpoint import WEIGHTS, list_checkpoints
    from bert_packed.runs.run_directory import FLAGFILE

    start = (kept_flags(output_dir) or {}).get("init_checkpoint")
    if not start:
        return False
    began = _modified(Path(output_dir) / FLAGFILE)  # written at a run's start, and never again
    checkpoints = list_checkpoints(start)
    written = _modified(checkpoints[-1] / WEIGHTS) if checkpoints else None
    if began is not None and written is not None and written > began:
        return True
    return is_outdated(start)


def find_changed_file(run, folder):
    """A file that makes what a run has come to another's: its path, or None.

    Args:
        run, folder: As of `is_complete`.

    Returns:
        As `find_changed_input`, and the questions that were answered, where they are others now.

    Raises:
        InputError: a flag of the run is wrong, or a manifest cannot be read.
    """
    wanted = settings_of(run, folder)
    changed = find_changed_input(wanted.output_dir)
    if changed is None and run.program == SQUAD:
        scored = _read_note(run, folder).get("predict_sha256")
        if scored and checksum(wanted.predict_file) not in (None, scored):
            return wanted.predict_file
    return changed


def note_scoring(run, folder):
    """Write down, before a SQuAD run is taken, by which flags and of what its next scores are made.

    Its run.json keeps those of its training, though it may answer other questions later.
    """
    from bert_packed.runs.run_directory import SCORES_FILE

    wanted = settings_of(run, folder)
    scored_before = _modified(Path(wanted.output_dir) / SCORES_FILE)
    flags = {name: getattr(wanted, name) for name in SCORING}
    note = {"flags": flags, "predict_sha256": checksum(wanted.predict_file), "scored_before": scored_before}
    write_json(_note_file(run, folder), note)


def _other_flags(run, folder):
    """Flags on which the result depends that a run has otherwise than it is wanted: dict to its values."""
    wanted = settings_of(run, folder)
    kept = kept_flags(wanted.output_dir)
    if kept is None:
        return {}
    names = {name for name in result_settings(wanted) if name not in INTERVALS}
    if run.program == SQUAD:
        kept = {**kept, **_read_note(run, folder).get("flags", {})}
        names |= set(SCORING)
    other = {}
    for field in dataclasses.fields(wanted):
        # A flag that is newer than the run was at its default
        before, now = kept.get(field.name, field.default), getattr(wanted, field.name)
        is_same = before == now or (field.name == "init_checkpoint" and _is_same_path(before, now))
        if field.name in names and not is_same:
            other[field.name] = before
    return other


def _note_file(run, folder):
    return Path(folder) / f"{run.name}.scored.json"


def _read_note(run, folder):
    return read_object(_note_file(run, folder))


def _modified(path):
    """When a file was last written, in nanoseconds, or None."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def _is_same_path(one, other):
    return bool(one) and bool(other) and Path(one).resolve() == Path(other).resolve()
