"""What a BERT checkpoint of Hugging Face or of google-research/bert holds, under our names.

Hugging Face    FOLDER/config.json, FOLDER/model.safetensors
Google          FOLDER/bert_config.json, FOLDER/bert_model.ckpt.index, .data-00000-of-00001
SavedModel      FOLDER/bert_config.json, FOLDER/variables/variables.index, .data-00000-of-00001
"""

import dataclasses
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from bert_packed.checkpoints.pretrained_names import tensor_names
from bert_packed.config import load_model_config
from bert_packed.models.modeling import PRETRAINING
from data_gen.cli.settings import InputError

HUGGING_FACE_WEIGHTS, HUGGING_FACE_CONFIG = "model.safetensors", "config.json"
GOOGLE_CONFIG = "bert_config.json"
TIED_WEIGHT, TIED_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
WORD_EMBEDDINGS, OUTPUT_BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"


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
        return False
    try:
        with safe_open(path, "numpy") as file:
            return not any("/" in name for name in file.keys())  # noqa: SIM118  it is no dict
    except SafetensorError:
        return (Path(folder) / HUGGING_FACE_CONFIG).is_file()


def read_hugging_face(folder, head=PRETRAINING):
    """Read `config.json` and `model.safetensors` of a BERT with any heads.

    Names may lack the prefix `bert.` (a bare `BertModel`), and layer norms may be `gamma` and `beta` as in
    the oldest files. An output matrix stored beside the word embeddings must be equal to them: ours is one.

    Args:
        folder: Local folder.
        head: Which of `modeling.HEADS` our model has; tensors of others are unused.

    Returns:
        `ForeignCheckpoint`.

    Raises:
        InputError: a file is missing or damaged, two tensors have one name, or the output matrix is not tied.
    """
    folder = Path(folder)
    if not (folder / HUGGING_FACE_CONFIG).is_file():
        raise InputError(
            f"{folder} must hold {HUGGING_FACE_CONFIG} beside {HUGGING_FACE_WEIGHTS}. Received: no such file."
        )
    config = load_model_config(str(folder / HUGGING_FACE_CONFIG))
    path = folder / HUGGING_FACE_WEIGHTS
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} must be a complete safetensors file. Received: {error}.") from error
    by_full_name = {}
    for name in stored:
        full = _full_name(name)
        if full in by_full_name:
            raise InputError(f"{path} must hold each tensor once. Received: {by_full_name[full]} and {name}.")
        by_full_name[full] = name
    _check_tied(path, stored, by_full_name)
    if OUTPUT_BIAS not in by_full_name and TIED_BIAS in by_full_name:
        by_full_name[OUTPUT_BIAS] = by_full_name.pop(TIED_BIAS)
    table = {
        row.hugging_face: (row.ours, row.hugging_face_transposed)
        for row in tensor_names(config.num_hidden_layers, head)
    }
    known = {name: table[full] for full, name in by_full_name.items() if full in table}
    # The tied matrix is used, as the word embeddings that it equals
    tied = {by_full_name.get(TIED_WEIGHT), by_full_name.get(TIED_BIAS)}
    return _translate(path, config, known, stored, lambda name: stored[name], tied)


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


def read_google(prefix, num_hidden_layers, head=PRETRAINING):
    """Read a TensorFlow checkpoint of google-research/bert, with any heads.

    Args:
        prefix: From `find_google`.
        num_hidden_layers: Of our model; further layers are unused.
        head: As in `read_hugging_face`.

    Returns:
        `ForeignCheckpoint`; `bert_config.json` is looked for beside the checkpoint and, for a SavedModel,
        one folder up.

    Raises:
        InputError: the files are damaged.
    """
    import tensorflow as tf  # only these files need it: under JAX nothing else loads TensorFlow

    config_file = next(
        (f for f in (prefix.parent / GOOGLE_CONFIG, prefix.parent.parent / GOOGLE_CONFIG) if f.is_file()),
        None,
    )
    config = load_model_config(str(config_file)) if config_file else None
    rows = tensor_names(num_hidden_layers, head)
    table = {row.google: (row.ours, row.google_transposed) for row in rows}
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
    """The checkpoint from its known names; `silent` names are neither used by name nor reported."""
    tensors, foreign_names = {}, {}
    for name, (ours, is_transposed) in known.items():
        values = np.asarray(read(name)).astype(np.float32)
        # A damaged vector has no transpose; its shape is refused later, by name
        tensors[ours] = values.T if is_transposed else values
        foreign_names[ours] = name
    unused = sorted(name for name in stored if name not in known and name not in silent)
    return ForeignCheckpoint(Path(path), tensors, unused, config, foreign_names)


def _full_name(name):
    """`encoder.layer.0.output.LayerNorm.gamma` -> `bert.encoder.layer.0.output.LayerNorm.weight`."""
    if name.split(".")[0] in ("embeddings", "encoder", "pooler"):
        name = f"bert.{name}"
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _check_tied(path, stored, by_full_name):
    for one, other in ((TIED_WEIGHT, WORD_EMBEDDINGS), (TIED_BIAS, OUTPUT_BIAS)):
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
        return safetensors_shapes(Path(path) / HUGGING_FACE_WEIGHTS)
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
    except SafetensorError:
        return {}
