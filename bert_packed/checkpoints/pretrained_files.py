"""Checkpoints of Hugging Face and of google-research/bert, read under our names.

Hugging Face    FOLDER/config.json, FOLDER/model.safetensors (or several, and model.safetensors.index.json)
Google          FOLDER/bert_config.json, FOLDER/bert_model.ckpt.index, .data-00000-of-00001
SavedModel      FOLDER/bert_config.json, FOLDER/variables/variables.index, .data-00000-of-00001
"""

import contextlib
import dataclasses
import re
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from bert_packed.architectures.registry import check_same_family, family_of, load_model_config
from bert_packed.checkpoints.checkpoint import check_floats, names_in, opened
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json

HUGGING_FACE_WEIGHTS, HUGGING_FACE_CONFIG = "model.safetensors", "config.json"
HUGGING_FACE_INDEX = "model.safetensors.index.json"  # the file of each tensor, where there are several
GOOGLE_CONFIG = "bert_config.json"


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint under our names."""

    path: Path  # file, or prefix of files
    tensors: dict[str, np.ndarray]  # float32, kernels as inputs × outputs
    unused: list[str]  # names, as in the file, of tensors that our model has no place for
    config: object  # stored beside the tensors; None where there is none
    stored_names: dict[str, str]  # from our names to the file's, for messages


@dataclasses.dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """A local folder of Hugging Face."""

    path: Path

    def config(self):
        """The config; `InputError` where `config.json` is missing, or not of a model that we have."""
        path = self.path / HUGGING_FACE_CONFIG
        if not path.is_file():
            raise InputError(
                f"{self.path} must hold {HUGGING_FACE_CONFIG} beside {HUGGING_FACE_WEIGHTS}. "
                "Received: no such file."
            )
        return load_model_config(str(path))

    @property
    def classes(self):
        """Names of classes of transformers in `config.json`; empty where it has none."""
        try:
            return list(read_json(self.path / HUGGING_FACE_CONFIG).get("architectures") or [])
        except (OSError, InputError, TypeError):
            return []  # `config` says what is wrong

    def shapes(self):
        """Shapes of the tensors by name, those of damaged files left out."""
        shapes = [safetensors_shapes(file) for file in self._files()[1]]
        return {name: shape for each in shapes for name, shape in each.items()}

    def read(self, model_config, head):
        """`StoredTensors` of a model with any heads, also of a bare encoder and in an older spelling."""
        config = self.config()
        check_same_family(self.path, config, model_config)
        names = family_of(config).load_names()
        path, files = self._files()
        stored = {}  # from a tensor's name to its file
        for file in files:
            with opened(file) as tensors:
                stored |= dict.fromkeys(names_in(tensors), file)

        def read(name):
            with opened(stored[name]) as tensors:
                check_floats(stored[name], {name: tensors.get_slice(name).get_dtype()})
                return tensors.get_tensor(name)

        by_full_name = {}
        for name in stored:
            full = names.full_name(name)
            if full in by_full_name:
                raise InputError(
                    f"{path} must hold each tensor once. Received: {by_full_name[full]} and {name}."
                )
            by_full_name[full] = name
        table = {row.hugging_face: row for row in names.tensor_names(config, head)}
        copies = set()  # used, as the tensors that they equal
        for copy, original in names.tied:
            if copy in table:
                continue
            if copy in by_full_name and original in by_full_name:
                one, other = by_full_name[copy], by_full_name[original]
                copies.add(one)
                if not np.array_equal(read(one), read(other)):
                    raise InputError(
                        f"{path} must hold {one} equal to {other}: the two are one tensor here. "
                        "Received: two different ones."
                    )
            elif copy in by_full_name:
                by_full_name[original] = by_full_name.pop(copy)
        known = {
            name: (table[full].ours, table[full].from_hugging_face)
            for full, name in by_full_name.items()
            if full in table
        }
        return _translate(path, config, known, stored, read, copies)

    def _files(self):
        """A name for messages, and the list of the folder's files of tensors."""
        path = self.path / HUGGING_FACE_WEIGHTS
        if path.is_file():
            return path, [path]
        index = self.path / HUGGING_FACE_INDEX
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise InputError(f"{index} must have a weight_map, an object. Received: {places!r:.100}.")
        for tensor, name in places.items():
            # A path would be read wherever it leads
            if not isinstance(name, str) or not re.fullmatch(r"[^/\0]+\.safetensors", name):
                raise InputError(
                    f"{index} must name a .safetensors file beside it for {tensor}. Received: {name!r:.100}."
                )
        return index, [index.with_name(name) for name in sorted({*places.values()})]


@dataclasses.dataclass(frozen=True)
class GoogleCheckpoint:
    """A TensorFlow checkpoint of google-research/bert, by the prefix of its files, from `find_google`."""

    path: Path
    classes = ()

    def config(self):
        """The config beside the checkpoint or, for a SavedModel, one folder up; None where there is none."""
        for folder in (self.path.parent, self.path.parent.parent):
            if (folder / GOOGLE_CONFIG).is_file():
                return load_model_config(str(folder / GOOGLE_CONFIG))
        return None

    def shapes(self):
        try:
            with self._reader() as reader:
                return {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}
        except InputError:
            return {}

    def read(self, model_config, head):
        """Read `StoredTensors`; layers beyond those of `model_config` are unused."""
        config = self.config()
        if config:
            check_same_family(self.path, config, model_config)
        rows = family_of(model_config).load_names().tensor_names(model_config, head)
        table = {row.google: (row.ours, row.from_google) for row in rows}
        with self._reader() as reader:
            stored = reader.get_variable_to_dtype_map()
            known = {name: table[name] for name in stored if name in table}
            check_floats(self.path, {name: stored[name].name for name in known})
            # SavedModels list the graph of their objects among the tensors
            hidden = {"_CHECKPOINTABLE_OBJECT_GRAPH"}
            return _translate(self.path, config, known, stored, reader.get_tensor, hidden)

    @contextlib.contextmanager
    def _reader(self):
        try:
            import tensorflow as tf  # which need not be installed under JAX
        except ImportError as error:
            raise InputError(
                f"{self.path}, a TensorFlow checkpoint, needs `pip install tensorflow`. Received: {error}."
            ) from error
        try:
            yield tf.train.load_checkpoint(str(self.path))
        # An IndexError means that a file is cut short
        except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"{self.path} must be a complete TensorFlow checkpoint. Received: {error}."
            ) from error


def is_hugging_face(folder):
    path = Path(folder) / HUGGING_FACE_WEIGHTS
    if not path.is_file():
        return (Path(folder) / HUGGING_FACE_INDEX).is_file()
    try:
        with safe_open(path, "numpy") as file:
            # Our own files have slashes in the names
            return not any("/" in name for name in names_in(file))
    except SafetensorError:
        return (Path(folder) / HUGGING_FACE_CONFIG).is_file()


def find_google(path):
    """The prefix of a TensorFlow checkpoint, from its prefix, its folder or a SavedModel's; None without."""
    path = Path(path)
    if Path(f"{path}.index").is_file():
        return path
    found = sorted(path.glob("*.index")) or sorted(path.glob("variables/*.index"))
    if len(found) > 1:
        raise InputError(
            f"`init_checkpoint` must name one of several checkpoints, as {found[0].with_suffix('')}. "
            f"Received: {path}."
        )
    return found[0].with_suffix("") if found else None


def safetensors_shapes(path):
    """Shapes of the tensors of a safetensors file by name; none of a damaged one."""
    try:
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in names_in(file)}
    except (SafetensorError, OSError):
        return {}


def _translate(path, config, known, stored, read, hidden):
    """`StoredTensors` of `known` names, a dict to (our name, function to our array)."""
    tensors, stored_names = {}, {}
    for name, (ours, to_ours) in known.items():
        tensors[ours] = to_ours(np.asarray(read(name)).astype(np.float32, copy=False))
        stored_names[ours] = name
    unused = sorted(name for name in stored if name not in known and name not in hidden)
    return StoredTensors(Path(path), tensors, unused, config, stored_names)
