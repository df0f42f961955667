"""Models by their names on the Hugging Face hub, as local folders of `huggingface_hub`'s cache.

    bert-base-uncased      answerdotai/ModernBERT-base      OWNER/NAME@REVISION, a branch, tag or commit

Token, cache, endpoint and offline mode are that package's: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. A
name becomes a folder once, at the entry of a command or function (`find_model`). Records of runs hold
NAME@COMMIT (`name_of`), which another machine, or another cache, understands as well.
"""

import logging
import os
import re
from pathlib import Path

from bert_packed.core.settings import InputError

logger = logging.getLogger(__name__)

NAME = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[^@\s]+))?")
SNAPSHOT = re.compile(r".*/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
# Weights in safetensors alone: a pickle runs what it holds
FILES = ("model*.safetensors", "*.json", "*.txt")
RULE = (
    "`init_checkpoint` must be a folder, or the prefix of a TensorFlow checkpoint, that exists, or NAME or "
    "NAME@REVISION of a model on the hub"
)
REASONS = {
    "GatedRepoError": "the hub gives it only to accounts that were granted access, by HF_TOKEN",
    "RepositoryNotFoundError": "the hub has no such model, or it is private and HF_TOKEN may not read it",
    "RevisionNotFoundError": "the hub has no such revision of it",
    "OfflineModeIsEnabled": "it is not whole in the cache, and HF_HUB_OFFLINE is set",
}


def find_model(name, begun=""):
    """The local folder of a model, downloaded where it is a name and not in the cache; logs which was taken.

    Args:
        name: Path, which wins where it exists; or NAME or NAME@REVISION; "" for no model.
        begun: NAME@COMMIT of the run that continues, whose commit then is that of NAME too.

    Raises:
        InputError: neither a path that exists nor a model that the hub gives, in safetensors.
    """
    name = str(name)
    match = NAME.fullmatch(name)
    if not name or Path(name).exists() or Path(f"{name}.index").is_file():
        if name and match:  # it might have been meant as a name
            logger.info("init_checkpoint is the local folder %s", os.path.abspath(name))
        return name
    if not match:
        raise InputError(f"{RULE}. Received: {name}.")
    folder = _download(begun if begun.rpartition("@")[0] == name else name)
    if not list(folder.glob("model*.safetensors")):
        raise InputError(f"{RULE}, with model.safetensors. Received: {name}, without; a .bin is not read.")
    logger.info("init_checkpoint is %s from the hub, in %s", name_of(folder), folder)
    return str(folder)


def name_of(path):
    """NAME@COMMIT of a folder of the cache; other paths as they are."""
    match = SNAPSHOT.fullmatch(os.path.abspath(path)) if path else None
    return f"{match['repo'].replace('--', '/')}@{match['commit']}" if match else path


def in_cache(name):
    """The folder of NAME@COMMIT if the cache has it; else, and for a path, `name`. Asks no hub."""
    match = NAME.fullmatch(name)
    if not match or not match["revision"] or Path(name).exists():
        return name
    try:
        return str(_download(name, local_files_only=True))
    except InputError:
        return name


def _download(name, **options):
    import huggingface_hub  # half a second, and not for local folders

    repo, revision = NAME.fullmatch(name).group("repo", "revision")
    try:
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=FILES, **options)
        )
    # The HTTP library below raises kinds of its own, and changed between versions
    except Exception as error:
        raise InputError(f"{RULE}. Received: {name}; {_reason(error)}.") from error


def _reason(error):
    """Why the hub gave nothing, in a line."""
    causes = [error]
    while causes[-1].__cause__:
        causes.append(causes[-1].__cause__)
    kinds = [kind.__name__ for cause in causes for kind in type(cause).__mro__]
    known = next((REASONS[kind] for kind in kinds if kind in REASONS), None)
    return known or " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split()).rstrip(".")
