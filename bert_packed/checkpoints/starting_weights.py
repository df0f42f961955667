"""Initial weights of a model from a checkpoint of any kind: `--init_checkpoint`."""

import dataclasses
from pathlib import Path

from bert_packed.architectures.registry import (
    FAMILIES,
    MASKED_LM,
    ablations,
    check_at_most,
    check_heads,
    check_same_family,
    family_of,
    load_model_config,
)
from bert_packed.checkpoints import checkpoint, pretrained_files
from bert_packed.checkpoints.pretrained_files import (
    GoogleCheckpoint,
    HuggingFaceCheckpoint,
    StoredTensors,
    safetensors_shapes,
)
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, read_text
from bert_packed.training.nonfinite import check_arrays

OPTIMIZER_SLOTS = ("/adam_m", "/adam_v")
LABELS_FILE = "labels.txt"  # of a fine-tuned run: names of its classes, one a line


@dataclasses.dataclass(frozen=True)
class StartingWeights:
    """The report of `load`."""

    path: Path
    num_used: int  # tensors of the checkpoint that are now in the model
    unused: list[str]  # names, as in the file, of the others
    missing: list[str]  # our names of the heads' tensors that keep their initial values
    changed: list[str]  # settings, each with its value and the one that the checkpoint was trained with

    def lines(self):
        """Lines for the log, with the name of every tensor that was not used or not found."""
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
        if self.changed:
            lines.append(f"  settings that are not the checkpoint's: {', '.join(self.changed)}")
        return lines


@dataclasses.dataclass(frozen=True)
class OwnCheckpoint:
    """A checkpoint folder of ours, with the methods of `HuggingFaceCheckpoint`."""

    path: Path
    classes = ()

    def config(self):
        path = self.path / checkpoint.MODEL_CONFIG
        return load_model_config(str(path)) if path.is_file() else None

    def shapes(self):
        return safetensors_shapes(self.path / checkpoint.WEIGHTS)

    def read(self, model_config, head):
        """The tensors that the stored head and another have in common, under the names of the other."""
        config = load_model_config(str(self.path / checkpoint.MODEL_CONFIG))
        check_same_family(self.path, config, model_config)
        tensor_names = family_of(config).load_names().tensor_names
        wanted = {row.hugging_face: row.ours for row in tensor_names(config, head)}
        theirs = tensor_names(config, stored_head(self.path)[0])
        names = {row.ours: wanted[row.hugging_face] for row in theirs if row.hugging_face in wanted}
        stored = checkpoint.read_weights(self.path)
        return StoredTensors(
            self.path,
            {ours: stored[name] for name, ours in names.items() if name in stored},
            sorted(name for name in stored if name not in names),
            config,
            {ours: name for name, ours in names.items()},
        )


def check(path, model_config, head):
    """Refuse early a checkpoint that `load` would refuse in pre-training for its place or config."""
    source = _find(path)
    config = source.config()
    if config and isinstance(source, OwnCheckpoint) and not _may_differ(path, head, any_head=False):
        checkpoint.check_config(source.path, model_config)
    elif config:
        check_same_family(path, config, model_config)
        _check_config(path, config, model_config)


def load(path, weights, model_config, head=None, any_head=None, new_head=""):
    """Put a checkpoint's weights into a model: `StartingWeights`.

    The encoder (`bert/...`, `backbone/...`) must be complete; heads that the checkpoint lacks keep their
    initial values. On an `InputError` the model is as it was.

    Args:
        path: A checkpoint folder of ours or a run's output directory; a Hugging Face folder; a TensorFlow
            checkpoint of google-research/bert (prefix or folder) or a SavedModel's folder. Local.
        weights: Dict from our names to Keras variables.
        head: Head of the model; None is the first of its family.
        any_head: True where a checkpoint of ours may have another head; None: in all but pre-training. One
            with masked tokens alone always may.
        new_head: Beginning of our names of weights that keep their initial values whatever the checkpoint
            has; "" for none.
    """
    family = family_of(model_config)
    names, head = family.load_names(), head or family.heads[0]
    any_head = head != family.heads[0] if any_head is None else any_head
    source = _find(path)
    if isinstance(source, OwnCheckpoint):
        # A flipped bit of a weight is a finite number of the right shape all the same
        files = (checkpoint.WEIGHTS, checkpoint.MODEL_CONFIG)
        checkpoint.check_checksums(source.path, files, others=False)
        # A head that only an objective knows has no table: its tensors are just those of the model
        is_same = not _may_differ(path, head, any_head) or weights.keys() == source.shapes().keys()
        if is_same and not new_head:
            checkpoint.check_config(source.path, model_config)
            stored = checkpoint.read_weights(source.path)
            checkpoint.assign_tensors(source.path / checkpoint.WEIGHTS, stored, weights)
            changed = _changed_settings(source.config(), model_config)
            return StartingWeights(source.path, len(weights), [], [], changed)
    found = _without_namesake(source.read(model_config, head), names, head, path)
    if found.config:
        _check_config(found.path, found.config, model_config)
    tensors = {
        name: values for name, values in found.tensors.items() if not (new_head and name.startswith(new_head))
    }
    missing = [name for name in weights if name not in tensors]
    for name in missing:
        if name.startswith(names.encoder):
            raise checkpoint.other_model(found.path, f"the file has no tensor for {name}.")
    for name, values in tensors.items():
        rule = f"{found.stored_names[name]}, which is {name} here, must have shape"
        checkpoint.check_equal(found.path, rule, tuple(weights[name].shape), values.shape)
    check_arrays(tensors, f"of {found.path}")
    for name, values in tensors.items():
        weights[name].assign(values)
    changed = _changed_settings(found.config, model_config)
    return StartingWeights(found.path, len(tensors), found.unused, missing, changed)


def without_heads(tensors, model_config):
    """Names of a file's tensors that no model of a family has, with any of its heads."""
    family = family_of(model_config)
    names = family.load_names()
    rows = [row for head in family.heads for row in names.tensor_names(model_config, head)]
    known = {name for row in rows for name in (row.ours, row.hugging_face, row.google)}
    return [name for name in tensors if names.full_name(name) not in known]


def read_config(path):
    """The config stored with a checkpoint; `InputError` where there is none. `path` is as in `load`."""
    config = _find(path).config()
    if config is None:
        config_names = f"{checkpoint.MODEL_CONFIG} or {pretrained_files.HUGGING_FACE_CONFIG}"
        raise InputError(f"`init_checkpoint` must hold {config_names}. Received: {path}.")
    return config


def read_model_config(init_checkpoint, bert_config_file="", vocab_size=None):
    """The config of `bert_config_file`, a path or size name (for `vocab_size` rows), or the checkpoint's."""
    if bert_config_file:
        return load_model_config(bert_config_file, vocab_size)
    if not init_checkpoint:
        raise InputError("`bert_config_file` must be given without `init_checkpoint`. Received: nothing.")
    return read_config(init_checkpoint)


def check_reads(model_config, heads, max_seq_length, num_wordpieces, init_checkpoint, bert_config_file=""):
    """Check that a model can read texts of `max_seq_length` tokens, 0 for any, with one of `heads`."""
    check_heads(model_config, heads, "bert_config_file" if bert_config_file else "init_checkpoint")
    if ablations(model_config):
        raise InputError(
            f"`init_checkpoint` must be of a model that keeps sequences apart. Received: "
            f"{init_checkpoint}, with {', '.join(ablations(model_config))}."
        )
    check_at_most(model_config, "max_position_embeddings", "`max_seq_length`", max_seq_length)
    check_at_most(model_config, "vocab_size", "the vocabulary of `vocab_file`", num_wordpieces)


def read_labels(path):
    """Names of classes in a file, one a line, the first of class 0: tuple of str; raises `InputError`."""
    return _each_once(path, tuple(line.strip() for line in read_text(path).rstrip("\n").split("\n")))


def stored_labels(init_checkpoint):
    """Names of the classes of a fine-tuned model; () where no `labels.txt` or `id2label` has them."""
    start = Path(init_checkpoint)
    for folder in (start, *([start.parent] if checkpoint.NAME.fullmatch(start.name) else [])):
        if (folder / LABELS_FILE).is_file():
            return read_labels(folder / LABELS_FILE)
    path = start / pretrained_files.HUGGING_FACE_CONFIG
    if not path.is_file():
        return ()
    try:
        by_number = read_json(path).get("id2label") or {}
        if not by_number:
            return ()
        return _each_once(path, tuple(by_number[str(number)] for number in range(len(by_number))))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path} must hold id2label from 0 on. Received: {error!r}.") from error


def stored_ablations(path):
    """Ablations that a checkpoint was trained under, by its own config; [] without a config."""
    # A config given beside the checkpoint may be a plain one, which fits the tensors as well
    config = _find(path).config()
    return ablations(config) if config else []


def stored_head(path):
    """The head of a checkpoint, by its tensors, and its number of outputs: `(name, number)`.

    A bare encoder counts as one with the first head of its family.
    """
    source = _find(path)
    shapes, classes, config = source.shapes(), source.classes, source.config()
    # Families have names of tensors in common, as `classifier.bias`
    families = [family_of(config)] if config else list(FAMILIES.values())
    for names in (family.load_names() for family in families):
        full_names = {names.full_name(name): shape for name, shape in shapes.items()}
        found = {
            head: full_names[name][0]
            for head, row in reversed(names.outputs.items())
            for name in (row.ours, row.hugging_face, row.google)
            if name in full_names
        }
        if found:
            # Labels of sequences and of tokens have one name at Hugging Face; without a class, of sequences
            named = [head for head in found if names.classes.get(head) in classes]
            head = next(iter(named or found))
            return head, found[head]
    return families[0].heads[0], 2


def _find(path):
    if pretrained_files.is_hugging_face(path):
        return HuggingFaceCheckpoint(Path(path))
    prefix = pretrained_files.find_google(path)
    return GoogleCheckpoint(prefix) if prefix else OwnCheckpoint(checkpoint.find_checkpoint(path))


def _each_once(path, names):
    if not names or not all(names) or len({*names}) < len(names):
        raise InputError(
            f"{path} must name each label once. Received: {', '.join(map(repr, names)) or 'none'}."
        )
    return names


def _may_differ(path, head, any_head):
    """True if a checkpoint of ours has another head than `head`, and may start a model nevertheless."""
    stored = stored_head(path)[0]
    # A model without next sentences may learn them: as from its export, that head starts at random
    return stored != head and (any_head or stored == MASKED_LM)


def _without_namesake(found, names, head, path):
    """Leave out the last layer of another head, which elsewhere only has the same name as this one's."""
    stored = stored_head(path)[0]
    own, other = names.outputs.get(head), names.outputs.get(stored)
    if stored == head or not own or not other or own.hugging_face != other.hugging_face:
        return found
    layer = own.ours.rpartition("/")[0] + "/"
    tensors = {name: values for name, values in found.tensors.items() if not name.startswith(layer)}
    dropped = [found.stored_names[name] for name in found.tensors.keys() - tensors.keys()]
    return dataclasses.replace(found, tensors=tensors, unused=sorted([*found.unused, *dropped]))


def _changed_settings(config, model_config):
    """Settings of a model that compute something else than in its checkpoint, whose config may be None."""
    if config is None:
        return []
    # The run prints a line about ablations itself
    silent = {*config.training_fields} - {*config.reported_fields}
    return [
        f"{name} {getattr(model_config, name)} (trained with {getattr(config, name)})"
        for name in (field.name for field in dataclasses.fields(config))
        if name not in silent
        and not name.startswith("ablation_")
        and getattr(config, name) != getattr(model_config, name)
    ]


def _check_config(path, config, model_config):
    shapeless = family_of(model_config).load_names().shapeless
    for name in ("num_hidden_layers", "hidden_size", *shapeless):
        checkpoint.check_equal(path, f"{name} must be", getattr(model_config, name), getattr(config, name))
    # A sound model may start an experiment; what an experiment trained must not pass for sound
    theirs, ours = ablations(config), ablations(model_config)
    if not {*theirs} <= {*ours}:
        wanted, received = (", ".join(some) or "none" for some in (ours, theirs))
        raise checkpoint.other_model(path, f"ablations must be {wanted}. Received: {received}.")
