"""What a checkpoint of Hugging Face or of google-research/bert holds, under our names.

Hugging Face    FOLDER/config.json, FOLDER/model.safetensors (or several, and model.safetensors.index.json)
Google          FOLDER/bert_config.json, FOLDER/bert_model.ckpt.index, .data-00000-of-00001
SavedModel      FOLDER/bert_config.json, FOLDER/variables/variables.index, .data-00000-of-00001
"""

import dataclasses
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from bert_packed.checkpoints.architecture import check_same_architecture
from bert_packed.checkpoints.pretrained_names import architecture_of
from bert_packed.config import load_model_config
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json

HUGGING_FACE_WEIGHTS, HUGGING_FACE_CONFIG = "model.safetensors", "config.json"
GOOGLE_CONFIG = "bert_config.json"
HUGGING_FACE_INDEX = "model.safetensors.index.json"  # in which of several files each tensor is


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A foreign checkpoint in our terms.

    Attributes:
        path: The file, or the prefix of files, that was read.
        tensors: Dict from our names to float32 arrays, kernels as inputs × outputs.
        unused: Names, as in the file, of tensors that our model has no place for, in order.
        config: The `ModelConfig` stored beside the tensors; None where there is none.
        foreign_names: Dict from our names to the file's, for messages.
    """

    path: Path
    tensors: dict[str, np.ndarray]
    unused: list[str]
    config: object
    foreign_names: dict[str, str]


def is_hugging_face(folder):
    """Whether a folder holds a Hugging Face checkpoint: our file has its name, but names with slashes."""
    path = Path(folder) / HUGGING_FACE_WEIGHTS
    if not path.is_file():
        return (Path(folder) / HUGGING_FACE_INDEX).is_file()
    try:
        with safe_open(path, "numpy") as file:
            return not any("/" in name for name in file.keys())  # noqa: SIM118  it is no dict
    except SafetensorError:
        return (Path(folder) / HUGGING_FACE_CONFIG).is_file()


def read_hugging_face_config(folder):
    """The config of a Hugging Face folder, of its architecture's class.

    Raises:
        InputError: `config.json` is missing, or not of a model that we have.
    """
    path = Path(folder) / HUGGING_FACE_CONFIG
    if not path.is_file():
        raise InputError(
            f"{folder} must hold {HUGGING_FACE_CONFIG} beside {HUGGING_FACE_WEIGHTS}. Received: no such file."
        )
    return load_model_config(str(path))


def read_hugging_face(folder, model_config, head):
    """Read `config.json` and the tensors of a model with any heads.

    Names may be those of a bare encoder (`BertModel`, `MambaModel`) and in an older spelling. A matrix stored
    beside the one that it is tied to must be equal to it: ours is one.

    Args:
        folder: Local folder.
        model_config: Config of our model.
        head: Which head our model has; tensors of others are unused.

    Returns:
        `ForeignCheckpoint`.

    Raises:
        InputError: a file is missing or damaged, it is of another kind of model, two tensors have one name,
            or the output matrix is not tied.
    """
    folder = Path(folder)
    config = read_hugging_face_config(folder)
    check_same_architecture(folder, config, model_config)
    architecture = architecture_of(config)
    path, files = _hugging_face_files(folder)
    stored = {}
    for file in files:
        try:
            stored |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} must be a complete safetensors file. Received: {error}.") from error
    by_full_name = {}
    for name in stored:
        full = architecture.full_name(name)
        if full in by_full_name:
            raise InputError(f"{path} must hold each tensor once. Received: {by_full_name[full]} and {name}.")
        by_full_name[full] = name
    for copy, original in architecture.tied:
        if original not in by_full_name and copy in by_full_name:
            by_full_name[original] = by_full_name.pop(copy)
    # A copy is used, as the tensor that it equals
    copies = {by_full_name[copy] for copy, _ in architecture.tied if copy in by_full_name}
    _check_tied(path, architecture, stored, by_full_name)
    table = {row.hugging_face: row for row in architecture.tensor_names(config, head)}
    known = {
        name: (table[full].ours, table[full].from_hugging_face)
        for full, name in by_full_name.items()
        if full in table
    }
    return _translate(path, config, known, stored, lambda name: stored[name], copies)


def stored_classes(path):
    """The classes of transformers that a checkpoint says it is of, in its `config.json`: list of str."""
    if not is_hugging_face(path):
        return []
    try:
        return list(read_json(Path(path) / HUGGING_FACE_CONFIG, default={}).get("architectures") or [])
    except (ValueError, TypeError):
        return []  # whoever reads the config says what is wrong


def _hugging_face_files(folder):
    """What the messages call a Hugging Face folder's tensors, and the files that they are in."""
    path = Path(folder) / HUGGING_FACE_WEIGHTS
    if path.is_file():
        return path, [path]
    index = Path(folder) / HUGGING_FACE_INDEX
    try:
        names = set(read_json(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} must be JSON with a weight_map. Received: {error!r}.") from error
    return index, [index.with_name(name) for name in sorted(names)]


def find_google(path):
    """The prefix of a TensorFlow checkpoint's files, or None where there is none.

    Args:
        path: A prefix (`.../bert_model.ckpt`), a folder with one checkpoint, or a SavedModel's folder.

    Raises:
        InputError: the folder holds several checkpoints; the prefix must be given.
    """
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


def read_google(prefix, model_config, head):
    """Read a TensorFlow checkpoint of google-research/bert, with any heads.

    Args:
        prefix: From `find_google`.
        model_config: Config of our model; further layers than its own are unused.
        head: As in `read_hugging_face`.

    Returns:
        `ForeignCheckpoint`; `bert_config.json` is looked for beside the checkpoint and, for a SavedModel,
        one folder up.

    Raises:
        InputError: the files are damaged, or our model is not of this kind.
    """
    import tensorflow as tf  # only these files need it: under JAX nothing else loads TensorFlow

    config_file = next(
        (f for f in (prefix.parent / GOOGLE_CONFIG, prefix.parent.parent / GOOGLE_CONFIG) if f.is_file()),
        None,
    )
    config = load_model_config(str(config_file)) if config_file else None
    if config:
        check_same_architecture(prefix, config, model_config)
    rows = architecture_of(model_config).tensor_names(model_config, head)
    table = {row.google: (row.ours, row.from_google) for row in rows}
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        stored = reader.get_variable_to_shape_map()
        known = {name: table[name] for name in stored if name in table}
        # SavedModels list the graph of their objects among the tensors
        hidden = {"_CHECKPOINTABLE_OBJECT_GRAPH"}
        return _translate(prefix, config, known, stored, reader.get_tensor, hidden)
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError) as error:  # IndexError: a file cut short
        raise InputError(f"{prefix} must be a complete TensorFlow checkpoint. Received: {error}.") from error


def _translate(path, config, known, stored, read, silent):
    """The checkpoint from its known names, each with (our name, what makes its array ours).

    `silent` names are neither used by name nor reported.
    """
    tensors, foreign_names = {}, {}
    for name, (ours, to_ours) in known.items():
        tensors[ours] = to_ours(np.asarray(read(name)).astype(np.float32, copy=False))
        foreign_names[ours] = name
    unused = sorted(name for name in stored if name not in known and name not in silent)
    return ForeignCheckpoint(Path(path), tensors, unused, config, foreign_names)


def _check_tied(path, architecture, stored, by_full_name):
    for one, other in architecture.tied:
        if one in by_full_name and other in by_full_name:
            stored_one, stored_other = stored[by_full_name[one]], stored[by_full_name[other]]
            if not np.array_equal(stored_one, stored_other):
                raise InputError(
                    f"{path} must hold {by_full_name[one]} equal to {by_full_name[other]}: the two are one "
                    "tensor here. Received: two different ones."
                )


def stored_shapes(path):
    """Shapes of a foreign checkpoint's tensors by their names there; `path` as in `find_google`.

    Of a damaged file there are none: whoever reads the tensors says what is wrong.
    """
    if is_hugging_face(path):
        shapes = [safetensors_shapes(file) for file in _hugging_face_files(path)[1]]
        return {name: shape for each in shapes for name, shape in each.items()}
    import tensorflow as tf

    try:
        reader = tf.train.load_checkpoint(str(find_google(path)))
        return {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}
    except (tf.errors.OpError, ValueError, RuntimeError, IndexError):
        return {}


def safetensors_shapes(path):
    """Shapes of the tensors of a safetensors file by name; none of a damaged one."""
    try:
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return {}
