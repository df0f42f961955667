"""Whether a run may start or continue in its output directory: lock, flags and inputs, all as before."""

import contextlib
import dataclasses
import fcntl
import json
import shutil
from pathlib import Path

from bert_packed.checkpoint import list_checkpoints
from data_gen import records
from data_gen.command_line import to_flagfile, write_json
from data_gen.output import read_manifest
from data_gen.settings import InputError

RUN_FILE = "run.json"
FLAGFILE = "resolved.flags"
LOCK_FILE = ".lock"
OWN_NAMES = (RUN_FILE, FLAGFILE, "metrics.csv", "eval_metrics.csv")
OWN_FOLDERS = ("tensorboard",)


@contextlib.contextmanager
def locked(output_dir):
    """Hold a run's output directory, so that two runs never write to it at once; raises `InputError`."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"`output_dir` must not be used by another run. Received: {output_dir}."
            ) from error
        yield folder


def describe_inputs(files):
    """What identifies a run's input files, and how many packs they hold.

    Every byte is read once: the checksum tells a changed file, and a manifest that lists the same checksum
    tells the number of records without decoding them.

    Args:
        files: Paths of packed TFRecord files.

    Returns:
        List of dicts `path`, `sha256`, `num_records`.

    Raises:
        InputError: a file is damaged (file and record), or is not what its manifest says.
    """
    described = []
    for path in files:
        checksum = records.file_sha256(path)
        listed = {entry["name"]: entry for entry in (read_manifest(Path(path).parent) or {}).get("files", [])}
        entry = listed.get(Path(path).name)
        if entry and entry["sha256"] == checksum:
            num_records = entry["num_records"]
        else:
            num_records = records.count_records(path)  # names the record if the file is damaged
            if entry:
                raise InputError(
                    f"{path} must be the file that its manifest.json lists, with sha256 {entry['sha256']}. "
                    f"Received: {checksum}."
                )
        described.append({"path": str(path), "sha256": checksum, "num_records": num_records})
    return described


def open_run(folder, config, inputs):
    """Start a run in a directory, or check that it continues the one that is there.

    Args:
        folder: Output directory, locked.
        config: `TrainConfig`.
        inputs: Dict from flag name to the list that `describe_inputs` made.

    Returns:
        Path of the checkpoint to continue from, or None for a start.

    Raises:
        InputError: flags or inputs differ from the run's, or the directory holds something else.
    """
    flags = dataclasses.asdict(config)
    run_file = folder / RUN_FILE
    if config.overwrite:
        _remove_run(folder)
    checkpoints = list_checkpoints(folder)
    if not run_file.exists():
        others = sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)
        if others:
            raise InputError(
                f"`output_dir` must be empty or hold this run. Received: {folder}, which holds {others[0]}."
            )
    if checkpoints:
        _check_same(folder, json.loads(run_file.read_text()), flags, inputs, config)
    else:
        # Nothing to lose: a start that failed on a mistaken flag may be repeated with another
        _remove_run(folder)
        write_json(run_file, {"flags": flags, "inputs": inputs})
    (folder / FLAGFILE).write_text(to_flagfile(config))
    return checkpoints[-1] if checkpoints else None


def _check_same(folder, before, flags, inputs, config):
    changeable = {field.name for field in dataclasses.fields(config) if field.metadata["changeable"]}
    for name, value in flags.items():
        if name not in changeable and before["flags"].get(name) != value:
            raise InputError(
                f"`{name}` must be as in the run of {folder}, {before['flags'].get(name)!r}, unless "
                f"--overwrite. Received: {value!r}."
            )
    for name, entries in inputs.items():
        old, new = ([(e["path"], e["sha256"]) for e in side] for side in (before["inputs"][name], entries))
        changed = [path for path, checksum in new if (path, checksum) not in old]
        changed += [path for path, _ in old if path not in dict(new)]
        if changed:
            raise InputError(
                f"`{name}` must match the same files as in the run of {folder}, unless --overwrite. "
                f"Received: {changed[0]}, which differs."
            )


def _remove_run(folder):
    """Remove what an earlier run left; other people's files stay and are refused later."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for name in OWN_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in OWN_NAMES:
        (folder / name).unlink(missing_ok=True)
