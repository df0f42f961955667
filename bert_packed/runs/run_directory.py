"""Output directory of a run: its lock, whether the run may start or continue there, its records."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import uuid
from pathlib import Path

from bert_packed.architectures.registry import AUTO
from bert_packed.checkpoints.checkpoint import DAMAGED, NAME, check_checkpoint, list_checkpoints, set_aside
from bert_packed.core import storage
from bert_packed.core.command_line import to_flagfile
from bert_packed.core.hub import recorded_flags
from bert_packed.core.settings import InputError
from bert_packed.parallel.processes import ALONE
from bert_packed.parallel.targets import devices_here
from bert_packed.records.provenance import SCANS_NAME
from bert_packed.training.nonfinite import NotFiniteError

RUN_FILE = "run.json"
FLAGFILE = "resolved.flags"
LOCK_FILE = ".lock"
SCANS_FILE = SCANS_NAME  # what was found by reading all input files
SCORES_FILE = "eval_results.json"  # as Hugging Face's examples name it
OWN_FILES = (
    *(RUN_FILE, FLAGFILE, LOCK_FILE, SCANS_FILE, "metrics.csv", "eval_metrics.csv"),
    *("vocab.txt", "tokenizer.json", SCORES_FILE),
)
SKIPPED_FILE = re.compile(r"skipped_steps\.\d+\.jsonl")
EVENTS_FOLDER = "tensorboard"
# Flags that are gone had these defaults. `autotune` is not among them: it chose for each machine
REMOVED_FLAGS = {"recipe": "", "summa": "gather", "peak_flops": 0.0}
EXPORT = re.compile(r"export-\d+(\.replaced)?")  # of `exports.py`


@contextlib.contextmanager
def locked(output_dir, processes=ALONE):
    """Lock a run's output directory, so that two runs never write to it at once: context manager of its path.

    The first process locks it for all. Raises `InputError` where another run holds it, or it is not one
    directory that all processes share.
    """
    folder = _check_folder(output_dir)
    with contextlib.ExitStack() as stack:
        # The others look for a random word in the file, since another disk may hold the same path
        word = processes.first_decides(lambda: stack.enter_context(_hold(folder)))
        found = folder / LOCK_FILE
        if not found.is_file() or found.read_text() != word:
            raise InputError(
                "`output_dir` must be one directory that all processes share. Received: "
                f"{output_dir}, in which process {processes.index} does not see what process 0 writes."
            )
        yield folder


@contextlib.contextmanager
def _hold(folder):
    """Hold the lock: context manager of a random word, which its file holds meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    path, in_use = folder / LOCK_FILE, f"`output_dir` must not be used by another run. Received: {folder}."
    with storage.lock(path, in_use) as descriptor:
        word = uuid.uuid4().hex
        with storage.naming_file(path):
            os.truncate(descriptor, 0)
            os.write(descriptor, word.encode())
            # Other machines read it through the shared disk, not through this one's memory
            os.fsync(descriptor)
        yield word


def read_run(folder):
    """The dict of a run's `run.json`, with every entry that a reader may ask for.

    Raises `InputError`, naming the file and the entry, where it is not as `start_run` wrote it.
    """
    path = Path(folder) / RUN_FILE
    run = storage.read_json(path)
    for name, empty in (("model", {}), ("data", {}), ("inputs", {}), ("segments", []), ("result_files", [])):
        run.setdefault(name, empty)

    def check(name, value, is_right, rule):
        if not is_right:
            raise InputError(f"{path}: `{name}` must be {rule}. Received: {value!r}.")

    for name in ("flags", "model", "data", "inputs"):
        check(name, run.get(name), isinstance(run.get(name), dict), "an object")
    check("result_files", run["result_files"], isinstance(run["result_files"], list), "a list")
    for name in ("num_train_steps", "train_batch_size", "micro_batch_size"):
        value = run["flags"].get(name, 0)
        check(name, value, type(value) is int, "a whole number")
    factor = run["data"].get("packing_factor")
    check("packing_factor", factor, factor is None or type(factor) in (int, float), "a number")
    for entries in run["inputs"].values():
        is_right = _are_objects(entries, "path", "sha256")
        check("inputs", entries, is_right, "lists of objects with path and sha256")
    vocabulary = run.get("vocabulary")  # None where none was found
    is_right = vocabulary is None or _are_objects([vocabulary], "sha256")
    check("vocabulary", vocabulary, is_right, "an object with sha256")
    is_right = _are_objects(run["segments"], "backend")
    check("segments", run["segments"], is_right, "a list of objects with backend")
    return run


def _are_objects(entries, *names):
    """True for a list of objects that have texts of these names."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in names)
        for entry in entries
    )


def check_own(output_dir, result_files=()):
    """Raise `InputError` unless a directory is missing, empty or a run's: no file, no files of others.

    `result_files` are names of files that the run that is about to start writes as results.
    """
    folder = _check_folder(output_dir)
    others = sorted(path.name for path in folder.iterdir() if not _is_ours(path)) if folder.exists() else []
    # A folder is a result only beside a run: another program's folder may have that name
    others = [name for name in others if name not in result_files or (folder / name).is_dir()]
    if others and (folder / RUN_FILE).exists():  # another task's run wrote others
        others = [name for name in others if name not in read_run(folder)["result_files"]]
    if folder.exists() and (others or (list_checkpoints(folder) and not (folder / RUN_FILE).exists())):
        # Nothing is removed before this: `checkpoint-500` may be another tool's
        name = others[0] if others else list_checkpoints(folder)[-1].name
        raise InputError(
            f"`output_dir` must be empty or hold this run. Received: {folder}, which holds {name}."
        )


@contextlib.contextmanager
def naming_last_checkpoint(folder):
    """Name the last good checkpoint in the `InputError` of a body whose training diverges."""
    try:
        yield
    except NotFiniteError as error:
        good = list_checkpoints(folder)
        if error.weights_step is not None:
            # The weights of this step gave the loss that is not finite, so its checkpoint is no good one
            good = [path for path in good if int(NAME.fullmatch(path.name)[1]) < error.weights_step]
        start = f"start from {good[-1]}, the last good checkpoint, by `init_checkpoint`" if good else "start"
        raise InputError(
            f"{error} To go on, {start} in a new `output_dir`, with a lower `learning_rate` or "
            "`max_grad_norm`."
        ) from error


def find_checkpoint(folder, config, facts):
    """The checkpoint to continue from in a locked output directory, or None for a start; changes nothing.

    Args:
        config: `PretrainingConfig` or `FinetuneConfig`.
        facts: Dict of JSON-able dicts that the result depends on besides flags: `inputs` (from flag name to
            the list that `input_files.describe_inputs` made), `model`, `data`; `vocabulary` may be there.

    Raises:
        InputError: flags, inputs or other facts differ from the run's, or the directory is not a run's.
    """
    check_own(folder, config.result_files)
    checkpoints = list_checkpoints(folder)
    # There is nothing to lose without a checkpoint: a start that failed on a mistake may be repeated
    if config.overwrite or not checkpoints:
        return None
    run = read_run(folder)  # `check_own` has found it beside the checkpoints
    for name, default in REMOVED_FLAGS.items():
        value = run["flags"].get(name, default)
        if value != default:
            raise InputError(
                f"a run must continue without `{name}`, which is gone, or with its default, {default!r}, "
                f"unless --overwrite. Received: {value!r}, in {folder / RUN_FILE}."
            )
    differences = _differences(run, config, facts)
    if differences:
        raise InputError(
            f"a run must continue as it was, unless --overwrite. Received: {'; '.join(differences)}; "
            f"the run of {folder} has the former."
        )
    return checkpoints[-1]


def find_whole_checkpoint(folder, report):
    """The newest checkpoint of a run that is as it was written; newer, damaged ones are set aside.

    `report` gets a line about each of these. The first of several processes calls this, before the others
    list the checkpoints. Raises `InputError` where none is whole; then nothing is changed. Raises `OSError`
    where one cannot be read for another reason than a bad disk.
    """
    damaged = []
    for path in reversed(list_checkpoints(folder)):
        try:
            check_checkpoint(path)
        except (InputError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise  # no permission, say: the checkpoint may be good
            damaged.append((path, error))
            continue
        for other, error in damaged:
            report(f"{other.name} is damaged, now {set_aside(other).name}; {path.name} is next: {error}")
        return path
    path, error = damaged[0]
    raise InputError(
        f"a run must have a whole checkpoint to continue from; --overwrite starts again. Received: {error} "
        f"Of {len(damaged)} checkpoints of {folder} none is whole."
    )


def agree(folder, config, facts, report, processes=ALONE):
    """The checkpoint that all processes of a run continue from, or None for a start; the first finds it.

    Arguments and errors are those of `find_checkpoint` and `find_whole_checkpoint`. `InputError` is also
    raised where flags, inputs or other facts differ from the first process's.
    """
    first = processes.first_decides(lambda: {"flags": recorded_flags(config), **facts})
    differences = _differences(first, config, facts)
    if differences:
        raise InputError(
            f"all processes of a run must be given the same. Received: {'; '.join(differences)}; process 0 "
            "has the former."
        )

    def find():
        continues = find_checkpoint(folder, config, facts)
        return find_whole_checkpoint(folder, report).name if continues else None

    name = processes.first_decides(find)
    return folder / name if name else None


def as_begun(config, processes=ALONE):
    """A config with `dtype=auto` and `micro_batch_size=0` as its output directory's run began.

    Where none did, `dtype` is that of the devices, and `micro_batch_size` stays.
    """

    def choose():
        flags = begun_flags(config)
        # The micro-batch might not divide another batch
        is_same = flags.get("train_batch_size") == config.train_batch_size
        micro_batch_size = flags.get("micro_batch_size", 0) if is_same else 0
        return flags.get("dtype", devices_here().dtype), micro_batch_size

    # All processes ask, whatever their flags, as these are compared later
    dtype, micro_batch_size = processes.first_decides(choose)
    return dataclasses.replace(
        config,
        dtype=dtype if config.dtype == AUTO else config.dtype,
        micro_batch_size=config.micro_batch_size or micro_batch_size,
    )


def begun_flags(config):
    """The flags of the run that a config continues; {} for a start."""
    folder = _check_folder(config.output_dir)
    # A start without a checkpoint may change all of its flags
    continues = not config.overwrite and folder.is_dir() and list_checkpoints(folder)
    return read_run(folder)["flags"] if continues and (folder / RUN_FILE).exists() else {}


def check_outside(init_checkpoint, folder):
    """Raise `InputError` where a checkpoint to start from lies in the output directory."""
    if Path(init_checkpoint).resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"`init_checkpoint` must be outside `output_dir`, which is emptied. Received: {init_checkpoint}."
        )


def start_run(folder, config, facts):
    """Remove what an earlier run left, and write this run's `run.json` and flagfile."""
    for path in folder.iterdir():
        if path.is_dir():
            storage.remove_folder(path)
        # The lock is held on that very file, and the scans are this run's
        elif path.name not in (LOCK_FILE, SCANS_FILE):
            path.unlink()
    results = {"result_files": list(config.result_files)} if config.result_files else {}
    storage.write_json(folder / RUN_FILE, {"flags": recorded_flags(config), **facts, **results})
    # The flagfile is only for people: continuing compares with `run.json`
    storage.write_text(str(folder / FLAGFILE), to_flagfile(config))


def describe_continuation(folder, checkpoint):
    """A line that says where a run continues, and one where `XLA_FLAGS` are not those of its last segment."""
    text = f"continues from {checkpoint}"
    segments = read_run(folder)["segments"] or [{}]
    before, now = segments[-1].get("xla_flags"), os.environ.get("XLA_FLAGS", "")
    if before in (None, now):  # None: fine-tuning did not record them before
        return text
    change = f"XLA_FLAGS were {before!r} before, {now!r} now"
    return f"{text}\nxla        {change}: results may differ in the last digits"


def record_segment(folder, first_step, backend, **facts):
    """Record in `run.json` the backend, the XLA flags and `facts` with which a run trains on from a step.

    For a run that was stopped at step 700 and went on under JAX,

        "segments": [{"first_step": 0, "backend": "tensorflow", "xla_flags": ""},
                     {"first_step": 700, "backend": "jax", "xla_flags": ""}]
    """
    run = read_run(folder)
    segment = {
        "first_step": first_step,
        "backend": backend,
        **facts,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    storage.write_json(folder / RUN_FILE, {**run, "segments": [*run["segments"], segment]})


def record_skipped(folder, process, step, why, sources):
    """Record a step that was left out as a line of JSON in `skipped_steps.PROCESS.jsonl`.

        {"step": 12, "not_finite": "nsp_loss inf", "packs": {"packed-0.tfrecord": [7, 31]}}

    A step that is taken again after a kill may have two lines. `sources` is a dict from file to the numbers
    of the records of this process; `find_sources.py` leads from these to documents.
    """
    line = json.dumps({"step": step, "not_finite": why, "packs": sources})
    path = folder / f"skipped_steps.{process}.jsonl"
    with storage.naming_file(path), path.open("a") as file:
        file.write(line + "\n")


def remove_partial(folder):
    """Remove checkpoints that a kill left half-written or half-removed, and half-written scans."""
    for path in folder.glob(f"*{storage.PARTIAL_SUFFIX}"):
        if path.is_dir():
            storage.remove_folder(path)
        else:
            path.unlink()


def _is_ours(path):
    if path.is_dir():
        whole = path.name.removesuffix(storage.PARTIAL_SUFFIX)
        return path.name == EVENTS_FOLDER or any(one.fullmatch(whole) for one in (DAMAGED, EXPORT, NAME))
    # A file that is being written has a random number and a suffix after its name
    name = re.sub(r"(\.[0-9a-f]{32})?\.partial$", "", path.name)
    return name in OWN_FILES or bool(SKIPPED_FILE.fullmatch(path.name))


def _check_folder(output_dir):
    storage.check_local(output_dir, "output_dir")  # a `Path` would make a local folder of a URL
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"`output_dir` must be a directory. Received: {output_dir}, which is a file.")
    return folder


def _differences(before, config, facts):
    """Everything that differs from the run on record: list of texts."""
    found, flags = [], recorded_flags(config)
    for field in dataclasses.fields(config):
        # A flag that is newer than the run was at its default
        old, new = before["flags"].get(field.name, field.default), flags[field.name]
        if not field.metadata["changeable"] and old != new:
            found.append(f"{field.name} {old!r} -> {new!r}")
    for kind in ("model", "data"):
        for name, new in facts[kind].items():
            # A run that is older than a fact does not have it
            if name in before[kind] and (old := before[kind][name]) != new:
                found.append(f"{name} of the {kind} {old!r} -> {new!r}")
    vocabularies = [side.get("vocabulary") for side in (before, facts)]
    if all(vocabularies):  # a run may learn of it when it continues
        old, new = (vocabulary["sha256"] for vocabulary in vocabularies)
        if old != new:
            found.append(f"SHA-256 of the vocabulary {old[:12]}... -> {new[:12]}...")
    for argument, entries in facts["inputs"].items():
        sides = (before["inputs"].get(argument, []), entries)  # none: another command's run
        old, new = ({e["path"]: e["sha256"] for e in side} for side in sides)
        for path in sorted(old.keys() | new.keys()):
            if old.get(path) != new.get(path):
                found.append(
                    f"{argument} {path} changed" if path in old and path in new else f"{argument} {path}"
                )
    return found
