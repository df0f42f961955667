"""The output directory of `bert-packed train`: its places, and which call may go on in it."""

import dataclasses
import glob
import os

from bert_packed.checkpoints.checkpoint import list_checkpoints
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.inputs import read_own_manifest, stamp_files
from bert_packed.records.provenance import resolve_path

CALL_FILE = "bert_packed_train.json"  # settings and text of the call, which a call that goes on must share
TRAINING_FLAGS = os.path.join("flags", "pretrain.flags")
# Settings that the file of an older call lacks, with their defaults
NEWER = {"attention": "auto", "distribution": "none"}
# What the steps leave, in their order
RESULTS = ("flags", "instances", "packed", "proof.json", "run", "audit.json", "model")


@dataclasses.dataclass(frozen=True)
class OutputFolder:
    """Paths below an output directory."""

    top: str

    def path(self, *names):
        return os.path.join(self.top, *names)

    @property
    def run(self):
        return self.path("run")

    @property
    def model(self):
        return self.path("model")

    @property
    def training_flags(self):
        return self.path(TRAINING_FLAGS)

    @property
    def vocab_file(self):
        """Vocabulary of the instances, of either kind."""
        of_bytes = self.path("instances", "tokenizer.json")
        return of_bytes if storage.exists(of_bytes) else self.path("instances", "vocab.txt")

    def instance_files(self, split):
        """A glob, in which characters of the folder's own name mean themselves."""
        return os.path.join(glob.escape(self.top), "instances", f"{split}-*.tfrecord")

    def packed_files(self, split):
        return os.path.join(glob.escape(self.top), "packed", split, "*.tfrecord")

    def remove(self, *names):
        """Remove files and folders that are there."""
        for name in names:
            path = self.path(name)
            if storage.is_folder(path):
                storage.remove_folder(path)
            elif storage.exists(path):
                storage.remove(path)

    def remove_after(self, name):
        """Remove what later steps than the one that leaves `name` have made of it.

        A run continues, and a model stays until another one is audited.
        """
        later = RESULTS[RESULTS.index(name) + 1 :]
        self.remove(*(one for one in later if one not in ("run", "model")))

    def instances_manifest(self):
        """The manifest of the instances, None where they are not made; `InputError` if it is not ours."""
        return read_own_manifest(self.path("instances"), "unpacked")

    def packs_manifest(self, split):
        """The manifest of a split's packs, as `instances_manifest`."""
        return read_own_manifest(self.path("packed", split), "packed")

    def begun_start(self, overwrite):
        """The `init_checkpoint` of an earlier call, as it was recorded; "" for none."""
        call = {} if overwrite else storage.read_json(self.path(CALL_FILE), default={})
        return call.get("data", {}).get("init_checkpoint", "")

    def is_kept(self):
        """True where steps have left what only `overwrite` may remove."""
        made = [name for name in RESULTS if name not in ("flags", "instances")]
        return self.instances_manifest() is not None or any(storage.exists(self.path(name)) for name in made)


def describe_text(sources):
    """The text of a call as plain JSON: of each file its path, bytes, time of the last change and weight."""
    stamps = []
    for source in sources:
        for path, size, time in stamp_files(source.paths):
            place = _place(path)
            stamps.append([place, size, time, source.weight])
    return sorted(stamps)


def begin(config, folder, text):
    """Begin in an output directory that is empty, or make sure that a call may go on in it.

    A call may change how the model is trained until the training has saved a checkpoint. `text` is as
    `describe_text` made it. Raises `InputError` where the directory is another's, or another call's.
    """
    path = folder.path(CALL_FILE)
    call = {"text": text, **config.recorded()}
    if not storage.exists(path):
        if os.path.isdir(folder.top) and (others := sorted(os.listdir(folder.top))):
            raise InputError(
                f"`output_dir` must be empty or an earlier call's. Received: {folder.top}, which holds "
                f"{others[0]}."
            )
        storage.make_folder(folder.top)
        storage.write_json(path, call)
        return
    before = storage.read_json(path)
    if config.overwrite or before.get("is_emptied") == call:
        # This is written before anything goes: a call after a kill must not take the rest for whole
        storage.write_json(path, {"is_emptied": call})
        folder.remove(*RESULTS)
        storage.write_json(path, call)
    elif not folder.is_kept():
        folder.remove(TRAINING_FLAGS)
        storage.write_json(path, call)
    elif before.get("text") != text and not _has_same_content(folder, before.get("text"), text):
        raise InputError(
            f"`input_file` must be the text that {path} names, as it was, unless --overwrite. "
            "Received: other files, or changed ones."
        )
    elif changed := _changes(before.get("data"), call["data"]):
        raise InputError(
            f"a call must continue as it began, unless --overwrite. Received: {changed}; {path} has the "
            "former."
        )
    elif changed := _changes(before.get("training"), call["training"]):
        if list_checkpoints(folder.run) or storage.exists(folder.model):
            raise InputError(
                f"a training must continue as it began, unless --overwrite, or without {folder.run} and "
                f"{folder.model}. Received: {changed}; {path} has the former."
            )
        folder.remove(TRAINING_FLAGS, "audit.json")
        storage.write_json(path, call)
    elif before != call:  # the text has other stamps
        storage.write_json(path, call)


def _place(path):
    return path if storage.is_remote(path) else os.path.abspath(path)


def _has_same_content(folder, before, now):
    """True for texts of `describe_text` that differ in paths and times alone, as copies and mounts do."""
    manifest, instances = folder.instances_manifest(), folder.path("instances")
    if manifest is None:
        return False
    try:
        made = manifest["inputs"]
        known = {_place(resolve_path(entry, instances)): entry["sha256"] for entry in made}
        return sorted((known[path], weight) for path, _, _, weight in before) == sorted(
            (storage.file_sha256(path), weight) for path, _, _, weight in now
        )
    except (KeyError, TypeError, ValueError):  # written by hand
        return False


def _changes(before, now):
    """Differences between settings, as text."""
    before = before if isinstance(before, dict) else {}
    names = [name for name, value in now.items() if before.get(name, NEWER.get(name)) != value]
    return ", ".join(f"{name} {before.get(name)!r} -> {now[name]!r}" for name in names)
