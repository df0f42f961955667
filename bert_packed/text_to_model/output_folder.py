"""The output directory of `bert-packed train`: its places, and which call may go on in it."""

import dataclasses
import glob
import os
import shutil

from bert_packed.checkpoints.checkpoint import list_checkpoints
from bert_packed.core.settings import InputError
from bert_packed.core.storage import exists, file_sha256, make_folder, read_json, remove, write_json
from bert_packed.records.inputs import stamp_files
from bert_packed.records.manifests import MANIFEST_NAME
from bert_packed.records.provenance import resolve_path

CALL_FILE = "bert_packed_train.json"  # settings and text of the call, which a call that goes on must share
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
        return self.path("flags", "pretrain.flags")

    @property
    def vocab_file(self):
        """That of the instances, of either kind."""
        of_bytes = self.path("instances", "tokenizer.json")
        return of_bytes if exists(of_bytes) else self.path("instances", "vocab.txt")

    def instance_files(self, split):
        """A glob, in which characters of the folder's own name mean themselves."""
        return os.path.join(glob.escape(self.top), "instances", f"{split}-*.tfrecord")

    def packed_files(self, split):
        return os.path.join(glob.escape(self.top), "packed", split, "*.tfrecord")

    def remove(self, *names):
        """Remove files and folders that are there."""
        for name in names:
            path = self.path(name)
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif exists(path):
                remove(path)

    def remove_after(self, name):
        """Remove what later steps than the one that leaves `name` have made of it; a run continues."""
        later = RESULTS[RESULTS.index(name) + 1 :]
        self.remove(*(one for one in later if one != "run"))


def describe_text(sources):
    """The text of a call as plain JSON: of each file its path, bytes, time of the last change and weight."""
    stamps = []
    for source in sources:
        for path, size, time in stamp_files(source.paths):
            stamps.append([os.path.abspath(path), size, time, source.weight])
    return sorted(stamps)


def begin(config, folder, text):
    """Begin in an output directory that is empty, or make sure that a call may go on in it.

    A call may change how the model is trained until the training has saved a checkpoint. `text` is as
    `describe_text` made it. Raises `InputError` where the directory is another's, or another call's.
    """
    path = folder.path(CALL_FILE)
    call = {"text": text, "data": config.data_settings, "training": config.training_settings}
    if not exists(path):
        if os.path.isdir(folder.top) and (others := sorted(os.listdir(folder.top))):
            raise InputError(
                f"`output_dir` must be empty or an earlier call's. Received: {folder.top}, which holds "
                f"{others[0]}."
            )
        make_folder(folder.top)
        write_json(path, call)
        return
    before, is_made = read_json(path), exists(folder.path("instances", MANIFEST_NAME))
    if config.overwrite or before.get("is_emptied") == call or (before != call and not is_made):
        # Said before anything goes: a call after a kill must not take the rest for whole
        write_json(path, {"is_emptied": call})
        folder.remove(*RESULTS)
        write_json(path, call)
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
        if os.path.isdir(folder.run) and list_checkpoints(folder.run):
            raise InputError(
                f"a training must continue as it began, unless --overwrite, or without {folder.run}. "
                f"Received: {changed}; {path} has the former."
            )
        folder.remove(os.path.join("flags", "pretrain.flags"), "audit.json", "model")
        write_json(path, call)
    elif before != call:  # the text has other stamps
        write_json(path, call)


def _has_same_content(folder, before, now):
    """True for texts of `describe_text` that differ in paths and times alone, as copies and mounts do."""
    instances = folder.path("instances")
    made = read_json(os.path.join(instances, MANIFEST_NAME))["inputs"]
    known = {os.path.abspath(resolve_path(entry, instances)): entry["sha256"] for entry in made}
    try:
        return sorted((known[path], weight) for path, _, _, weight in before) == sorted(
            (file_sha256(path), weight) for path, _, _, weight in now
        )
    except (KeyError, TypeError, ValueError):  # written by hand
        return False


def _changes(before, now):
    """What differs between settings, as text."""
    before = before if isinstance(before, dict) else {}
    names = [name for name, value in now.items() if before.get(name) != value]
    return ", ".join(f"{name} {before.get(name)!r} -> {now[name]!r}" for name in names)
