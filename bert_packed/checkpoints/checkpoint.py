"""Checkpoints that appear whole or not at all, and that any backend reads: safetensors and JSON.

OUTPUT_DIR/checkpoint-200/
    model.safetensors       weights, by the path of each variable
    training.safetensors    optimizer and dropout state
    bert_config.json        the model's shape
    state.json              step and unfinished log interval
    SHA256SUMS              checksums of these files, as `sha256sum --check` reads them
"""

import contextlib
import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bert_packed.architectures.registry import check_same_family, config_json, load_model_config
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.training.nonfinite import NotFiniteError, check_arrays

WEIGHTS, TRAINING, MODEL_CONFIG, STATE = FILES = (
    "model.safetensors",
    "training.safetensors",
    "bert_config.json",
    "state.json",
)
CHECKSUMS = "SHA256SUMS"
NAME = re.compile(r"checkpoint-(\d+)")
DAMAGED = re.compile(r"checkpoint-(\d+)\.damaged(-\d+)?")  # put aside by `set_aside`
# Names of types in safetensors, then in TensorFlow
FLOAT_TYPES = ("F16", "BF16", "F32", "F64", "float16", "bfloat16", "float32", "float64")
_CHECKSUM = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")  # a line of `CHECKSUMS`


def save_checkpoint(output_dir, step, engine, model_config, state):
    """Write a checkpoint, which gets its name when every byte is on the disk; return its path.

    A `NotFiniteError` or `OSError` (a full disk) leaves older checkpoints as they were.
    """
    final = Path(output_dir) / f"checkpoint-{step}"
    with storage.write_folder(final) as partial:
        try:
            save_weights(partial, engine.weights(), model_config)
            _save(engine.training_state(), partial / TRAINING)
        except NotFiniteError as error:
            raise NotFiniteError(f"checkpoint-{step} is not written: {error}") from error
        (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
        lines = [f"{storage.file_sha256(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
        (partial / CHECKSUMS).write_text("".join(lines))
    return final


def prune_checkpoints(output_dir, keep):
    """Remove all but the newest `keep` checkpoints, at least 1, and damaged ones not past the newest."""
    found = list_checkpoints(output_dir)
    for old in found[:-keep]:
        # The folder gets another name first: half-empty after a kill, it must not pass for complete
        storage.remove_folder(old.rename(old.with_name(old.name + storage.PARTIAL_SUFFIX)))
    for path in list(Path(output_dir).iterdir()):
        damaged = DAMAGED.fullmatch(path.name)
        if damaged and found and int(damaged[1]) <= step_of(found[-1]):
            storage.remove_folder(path)


def check_checkpoint(path):
    """Check that a checkpoint folder is as it was written; `InputError` names a file that is not."""
    path = Path(path)
    # Older versions wrote no checksums. Reading shows a file that is cut short, but hardly a flipped bit
    if not check_checksums(path, FILES):
        for name in (WEIGHTS, TRAINING):
            read_tensors(path / name)
        read_state(path)


def check_checksums(folder, names, others=True):
    """Compare the bytes of files, of all that are listed with `others`, with checksums; False without any."""
    path = Path(folder) / CHECKSUMS
    if not path.exists():
        return False
    # Any byte is a character of Latin-1: a flipped bit must not be an error of decoding
    lines = path.read_text("latin-1").splitlines(keepends=True)
    found = [_CHECKSUM.fullmatch(line) for line in lines]
    if None in found or not set(names) <= {match[2] for match in found}:
        raise InputError(f"{path} must list {', '.join(names)}. Received: {len(lines)} lines.")
    for match in found:
        if not others and match[2] not in names:
            continue
        try:
            received = storage.file_sha256(Path(folder) / match[2])
        except FileNotFoundError:
            received = "no such file"
        if received != match[1]:
            raise InputError(
                f"{Path(folder) / match[2]} must have the SHA-256 {match[1]} of {CHECKSUMS}. "
                f"Received: {received}."
            )
    return True


def set_aside(path):
    """Give a damaged checkpoint a name that no run reads, as `checkpoint-7.damaged`; return the new path."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.damaged{number}") for number in numbers)
    return path.rename(next(name for name in names if not name.exists()))


def save_weights(folder, weights, model_config):
    """Write the finite weights and the shape of a model to a folder, not atomically."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _save(weights, folder / WEIGHTS)
    (folder / MODEL_CONFIG).write_text(json.dumps(config_json(model_config), indent=1) + "\n")


def list_checkpoints(output_dir):
    """Complete checkpoints of a run, oldest first."""
    if not Path(output_dir).is_dir():
        return []
    found = [path for path in Path(output_dir).iterdir() if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def restore_checkpoint(path, engine):
    """Put a run's checkpoint back into an engine; return the dict of `state.json`."""
    path = Path(path)
    state = read_state(path)
    for name, variables in ((WEIGHTS, engine.weights()), (TRAINING, engine.training_state())):
        assign_tensors(path / name, read_tensors(path / name), variables)
    return state


def read_state(path):
    """The dict of a checkpoint's `state.json`; `InputError` where no training loop saved it."""
    state, step = storage.read_json(path / STATE), step_of(path)

    def check(name, is_right, rule, default=None):
        value = state.get(name, default)
        if not is_right(value):
            raise InputError(f"{path / STATE}: `{name}` must be {rule}. Received: {value!r}.")

    check("step", lambda value: type(value) is int and value == step, f"{step}, as the folder's name")
    check("interval", _are_numbers, "an object of numbers")
    check("evaluation_due", lambda value: isinstance(value, bool), "true or false")
    # Older versions saved neither of these
    check("num_skipped", lambda value: type(value) is int, "a whole number", 0)
    check("watched", _are_numbers, "an object of numbers", {})
    return state


def _are_numbers(values):
    return isinstance(values, dict) and all(type(value) in (int, float) for value in values.values())


def check_config(folder, model_config):
    """Refuse a checkpoint whose config, where it has one, differs in more than `training_fields`."""
    if not (folder / MODEL_CONFIG).is_file():
        return
    theirs = load_model_config(str(folder / MODEL_CONFIG))
    check_same_family(folder, theirs, model_config)
    for field in dataclasses.fields(theirs):
        received, wanted = getattr(theirs, field.name), getattr(model_config, field.name)
        if field.name not in theirs.training_fields:
            check_equal(folder, f"{field.name} must be", wanted, received)


def other_model(path, reason):
    return InputError(f"{path} holds another model: {reason}")


def check_equal(path, rule, wanted, received):
    """Refuse a checkpoint of another model; the rule ends where the wanted value follows."""
    if received != wanted:
        raise other_model(path, f"{rule} {wanted}. Received: {received}.")


def find_checkpoint(path):
    """The checkpoint at a path: a checkpoint folder, or the newest of a run's output directory."""
    if (Path(path) / WEIGHTS).is_file():
        return Path(path)
    newest = list_checkpoints(path)[-1:]
    if not newest:
        raise InputError(
            f"`init_checkpoint` must be a folder with {WEIGHTS}, or hold such folders. Received: {path}."
        )
    return newest[0]


def read_weights(folder):
    """The weights of a checkpoint folder by name; `InputError` where they are damaged or quantized."""
    return read_tensors(Path(folder) / WEIGHTS, floats_only=True)


def step_of(path):
    return int(NAME.fullmatch(path.name)[1])


def read_tensors(path, floats_only=False):
    """The finite arrays of a safetensors file by name; `InputError` for a damaged or unwanted one."""
    with opened(path) as file:
        if floats_only:
            check_floats(path, {name: file.get_slice(name).get_dtype() for name in names_in(file)})
        tensors = {name: file.get_tensor(name) for name in names_in(file)}
    check_arrays(tensors, f"of {path}")
    return tensors


def check_floats(path, types):
    """Refuse quantized weights, by a dict from names to types."""
    # An int8 or a float8 without its scale reads as a number, but as another one
    for name, found in types.items():
        if found not in FLOAT_TYPES:
            raise InputError(f"{path} must hold {name} in floats of 16, 32 or 64 bits. Received: {found}.")


@contextlib.contextmanager
def opened(path):
    """Open a safetensors file to read arrays; `InputError` where it is missing or damaged."""
    try:
        with storage.naming_file(path), safe_open(path, "numpy") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise InputError(f"{path} must be a complete safetensors file. Received: {error}.") from error


def names_in(file):
    """The names of the tensors of an opened safetensors file, which cannot be iterated over itself."""
    return list(file.keys())


def assign_tensors(path, tensors, variables):
    """Assign tensors to the variables of their names: to all, or to none where the dicts differ."""
    missing = sorted(variables.keys() - tensors.keys()) + sorted(tensors.keys() - variables.keys())
    if missing:
        where = "the file" if missing[0] in variables else "the model"
        raise other_model(path, f"{where} has no tensor {missing[0]}.")
    for name, variable in variables.items():
        check_equal(path, f"{name} must have shape", tuple(variable.shape), tensors[name].shape)
    for name, variable in variables.items():
        variable.assign(tensors[name])


def write_tensors(arrays, path, metadata=None):
    """Write a dict from name to array as safetensors, not atomically; an `OSError` names the file."""
    path = Path(path)
    path.touch()
    mode = path.stat().st_mode  # as the umask says; `save_file` puts a file of mode 600 in its place
    try:
        save_file(arrays, path, metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    path.chmod(mode)


def _save(variables, path):
    arrays = {}
    for name, variable in variables.items():
        values = variable.numpy()
        # The type of steps and seeds differs between backends
        dtype = np.int64 if values.dtype.kind in "iu" else values.dtype
        # ascontiguousarray would make the scalar step count an array of one
        arrays[name] = np.array(values, dtype, order="C")
    check_arrays(arrays, "after the last step")
    write_tensors(arrays, path)


STEP_COUNT = "/iteration"  # Keras's name of it, below the optimizer's


def steps_before(latest, init_checkpoint):
    """Number of steps of earlier runs; `latest` is this run's own newest checkpoint, or None."""
    path = (latest or find_checkpoint(init_checkpoint)) / TRAINING
    try:
        with safe_open(path, "numpy") as file:
            counts = [int(file.get_tensor(name)) for name in names_in(file) if name.endswith(STEP_COUNT)]
    except (SafetensorError, FileNotFoundError) as error:
        raise InputError(f"{path} must hold an optimizer's state. Received: {error}.") from error
    if len(counts) != 1:
        raise InputError(f"{path} must hold the state of one optimizer. Received: {len(counts)}.")
    return counts[0] - (step_of(latest) if latest else 0)


def load_moments(init_checkpoint, engine):
    """Give an engine the moments of another run's optimizer, and its count of steps, all or nothing."""
    folder = find_checkpoint(init_checkpoint)
    check_checksums(folder, (TRAINING,), others=False)
    path, kind = folder / TRAINING, engine.optimizer.name
    stored = read_tensors(path)
    kinds = sorted(name.removesuffix(STEP_COUNT) for name in stored if name.endswith(STEP_COUNT))
    if kinds != [kind]:
        raise InputError(
            f"{path} must hold the moments of this run's `optimizer`, {kind}. Received: {', '.join(kinds)}."
        )
    # Seeds of dropout stay behind: the new run draws them from its `random_seed`
    moments, state = (
        {name: values for name, values in found.items() if name.startswith(f"{kind}/")}
        for found in (stored, engine.training_state())
    )
    assign_tensors(path, moments, state)
