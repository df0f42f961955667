"""Which weights a model starts from, whoever wrote the checkpoint: `--init_checkpoint`."""

import dataclasses
from pathlib import Path

from bert_packed.checkpoints import checkpoint, pretrained_files
from bert_packed.checkpoints.architecture import check_same_architecture
from bert_packed.checkpoints.pretrained_names import ARCHITECTURES, architecture_of
from bert_packed.config import ablations, load_model_config
from bert_packed.core.settings import InputError
from bert_packed.models.modeling import MASKED_LM
from bert_packed.training.finite import check_arrays

OPTIMIZER_SLOTS = ("/adam_m", "/adam_v")


@dataclasses.dataclass(frozen=True)
class StartingWeights:
    """What `load` did.

    Attributes:
        path: Checkpoint that was read.
        num_used: Tensors of it that are now in the model.
        unused: Names of those that are not, as in the file.
        missing: Names, ours, of the heads' tensors that it does not hold and that keep their initial values.
    """

    path: Path
    num_used: int
    unused: list[str]
    missing: list[str]

    def lines(self):
        """What to tell the user: list of str, every tensor that was not used or not found by its name."""
        slots = [name for name in self.unused if name.endswith(OPTIMIZER_SLOTS)]
        others = [name for name in self.unused if name not in slots]
        lines = [f"starts from {self.num_used} tensors of {self.path}"]
        if others:
            lines.append(f"  in the file only, not used: {', '.join(others)}")
        if slots:
            lines.append(
                f"  in the file only, not used: {slots[0]} and {len(slots) - 1} more of its optimizer"
            )
        if self.missing:
            lines.append(f"  in the model only, initial values kept: {', '.join(self.missing)}")
        return lines


def check(path, model_config, head):
    """Refuse, before anything is computed, what `load` refuses by a checkpoint's place or config alone.

    Args:
        path: As in `load`.
        model_config, head: Of the model that is to learn on from it, in pre-training.

    Raises:
        InputError: there is no checkpoint, or it is another model's. What its tensors say, `load` reads.
    """
    config = _find_config(path)
    if config and _is_ours(path) and not _may_differ(stored_head(path)[0], head, any_head=False):
        checkpoint.check_config(checkpoint.find_checkpoint(path), model_config)
    elif config:
        check_same_architecture(path, config, model_config)
        _check_config(path, config, model_config)


def load(path, weights, model_config, head=None, any_head=None):
    """Put a checkpoint's weights into a model.

    The encoder (`bert/...`, `backbone/...`) must be complete; heads that the checkpoint lacks keep their
    initial values.

    Args:
        path: A checkpoint folder of ours or a run's output directory; a Hugging Face folder; a TensorFlow
            checkpoint of google-research/bert (prefix or folder) or a SavedModel's folder. Local.
        weights: Dict from our names to Keras variables.
        model_config: Of the model; its class tells the architecture.
        head: Which head the model has; None is that of pre-training.
        any_head: Whether a checkpoint of ours may have another head. None: to start a fine-tuning it may,
            pre-training takes its own.

    Returns:
        `StartingWeights`.

    Raises:
        InputError: there is no checkpoint, it is damaged, or it is another model's (naming the first tensor
            or setting that differs), or was trained under an ablation that the model does not have. The model
            is then as it was.
    """
    architecture = architecture_of(model_config)
    head = head or architecture.first_head
    found = _read_foreign(path, model_config, head)
    if found is None:
        # A flipped bit of a weight is a finite number of the right shape all the same
        checkpoint.check_weights(checkpoint.find_checkpoint(path))
    if any_head is None:
        any_head = head != architecture.first_head
    is_ours = found is None
    if is_ours and _may_differ(stored_head(path)[0], head, any_head) and not _holds_just(path, weights):
        found = _read_ours(path, model_config, head)
    if found is None:
        folder = checkpoint.load_weights(path, weights, model_config)
        return StartingWeights(folder, len(weights), [], [])
    found = _without_namesake(found, architecture, head, path)
    if found.config:
        _check_config(found.path, found.config, model_config)
    missing = [name for name in weights if name not in found.tensors]
    for name in missing:
        if name.startswith(architecture.encoder):
            raise InputError(f"{found.path} holds another model: the file has no tensor for {name}.")
    _check_shapes(found, weights)
    check_arrays(found.tensors, f"of {found.path}")
    for name, values in found.tensors.items():
        weights[name].assign(values)
    return StartingWeights(found.path, len(found.tensors), found.unused, missing)


def read_config(path):
    """The config that a model was stored with, of its architecture's class; `path` is as in `load`.

    Raises:
        InputError: there is no checkpoint, or no config beside it.
    """
    found = _find_config(path)
    if found is None:
        config_names = f"{checkpoint.MODEL_CONFIG} or {pretrained_files.HUGGING_FACE_CONFIG}"
        raise InputError(f"`init_checkpoint` must hold {config_names}. Received: {path}.")
    return found


def stored_ablations(path):
    """Ablations that a checkpoint was trained under, as its config tells: list of str, [] without a config.

    What a config given beside it says is no proof: a plain one fits the tensors as well.
    """
    found = _find_config(path)
    return ablations(found) if found else []


def _find_config(path):
    """The config stored with a checkpoint, or None where there is none; raises `InputError`."""
    if pretrained_files.is_hugging_face(path):
        return pretrained_files.read_hugging_face_config(path)
    prefix = pretrained_files.find_google(path)
    folders = (prefix.parent, prefix.parent.parent) if prefix else (checkpoint.find_checkpoint(path),)
    for folder in folders:
        if (folder / checkpoint.MODEL_CONFIG).is_file():
            return load_model_config(str(folder / checkpoint.MODEL_CONFIG))
    return None


def stored_head(path):
    """Which head a checkpoint has, and how many outputs: `(name, number)`; `path` as in `load`.

    Whose it is, is told by its tensors. A bare BERT counts as of pre-training.
    """
    if _is_ours(path):
        shapes = pretrained_files.safetensors_shapes(checkpoint.find_checkpoint(path) / checkpoint.WEIGHTS)
    else:
        shapes = pretrained_files.stored_shapes(path)
    classes = pretrained_files.stored_classes(path)
    for architecture in ARCHITECTURES:
        full_names = {architecture.full_name(name): shape for name, shape in shapes.items()}
        found = {
            head: full_names[name][0]
            for head, row in reversed(architecture.outputs.items())
            for name in (row.ours, row.hugging_face, row.google)
            if name in full_names
        }
        if found:
            # Labels of sequences and of tokens have one name there
            named = [head for head in found if architecture.classes[head] in classes]
            head = next(iter(named or found))
            return head, found[head]
    return ARCHITECTURES[0].first_head, 2


def _is_ours(path):
    return not (pretrained_files.is_hugging_face(path) or pretrained_files.find_google(path))


def _may_differ(stored, head, any_head):
    """Whether a checkpoint of ours with the head `stored` may start a model with another, `head`."""
    # What has no next sentences may learn them: as from its export, that head starts anew
    return stored != head and (any_head or stored == MASKED_LM)


def _read_foreign(path, model_config, head):
    if pretrained_files.is_hugging_face(path):
        return pretrained_files.read_hugging_face(path, model_config, head)
    prefix = pretrained_files.find_google(path)
    return pretrained_files.read_google(prefix, model_config, head) if prefix else None


def _holds_just(path, weights):
    """Whether a checkpoint of ours has the tensors of a model and no others, whatever its head is called."""
    stored = pretrained_files.safetensors_shapes(checkpoint.find_checkpoint(path) / checkpoint.WEIGHTS)
    return weights.keys() == stored.keys()


def _read_ours(path, model_config, head):
    """A checkpoint of ours with another head, what both have in common under this head's names."""
    folder = checkpoint.find_checkpoint(path)
    config = load_model_config(str(folder / checkpoint.MODEL_CONFIG))
    check_same_architecture(folder, config, model_config)
    tensor_names = architecture_of(config).tensor_names
    wanted = {row.hugging_face: row.ours for row in tensor_names(config, head)}
    theirs = tensor_names(config, stored_head(path)[0])
    names = {row.ours: wanted[row.hugging_face] for row in theirs if row.hugging_face in wanted}
    stored = checkpoint.read_weights(folder)
    return pretrained_files.ForeignCheckpoint(
        folder,
        {ours: stored[name] for name, ours in names.items() if name in stored},
        sorted(name for name in stored if name not in names),
        config,
        {ours: name for name, ours in names.items()},
    )


def _without_namesake(found, architecture, head, path):
    """Leave out the last layer of another head, which elsewhere only has the same name as this one's."""
    stored = stored_head(path)[0]
    own, other = architecture.outputs.get(head), architecture.outputs.get(stored)
    if stored == head or not own or not other or own.hugging_face != other.hugging_face:
        return found
    layer = own.ours.rpartition("/")[0] + "/"
    tensors = {name: values for name, values in found.tensors.items() if not name.startswith(layer)}
    dropped = [found.foreign_names[name] for name in found.tensors.keys() - tensors.keys()]
    return dataclasses.replace(found, tensors=tensors, unused=sorted([*found.unused, *dropped]))


def _check_config(path, config, model_config):
    for name in ("num_hidden_layers", "hidden_size", *architecture_of(model_config).shapeless):
        theirs, ours = getattr(config, name), getattr(model_config, name)
        if theirs != ours:
            raise InputError(f"{path} holds another model: {name} must be {ours}. Received: {theirs}.")
    # A sound model may start an experiment; what an experiment trained must not pass for sound
    own = ablations(model_config)
    if not set(ablations(config)) <= set(own):
        raise InputError(
            f"{path} holds another model: ablations must be {_listed(own)}. "
            f"Received: {_listed(ablations(config))}."
        )


def _listed(names):
    return ", ".join(names) or "none"


def _check_shapes(found, weights):
    for name, values in found.tensors.items():
        want = tuple(weights[name].shape)
        if values.shape != want:
            raise InputError(
                f"{found.path} holds another model: {found.foreign_names[name]}, which is {name} here, must "
                f"have shape {want}. Received: {values.shape}."
            )
