"""Models and data sets by their names on the Hugging Face hub, through `huggingface_hub`.

    bert-base-uncased      answerdotai/ModernBERT-base      OWNER/NAME@REVISION, a branch, tag or commit
    hf://datasets/OWNER/NAME/data/train-*.parquet           hf://datasets/OWNER/NAME@REVISION/...

Token, cache, endpoint and offline mode are that package's: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. A
model's name becomes a folder of the cache once, at the entry of a command or function (`find_model`). Records
of runs hold NAME@COMMIT (`name_of`), which another machine, or another cache, understands as well. Files of
data sets are read over the network, range by range (`storage.open_file`), and not kept.
"""

import contextlib
import dataclasses
import logging
import os
import re
from pathlib import Path

from bert_packed.core.settings import InputError

logger = logging.getLogger(__name__)

NAME = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[^@\s]+))?")
OWNED = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SNAPSHOT = re.compile(r".*/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
# Weights in safetensors alone: a pickle runs what it holds
FILES = ("model.safetensors", "model-*-of-*.safetensors", "*.json", "*.txt")
RULE = (
    "`{}` must be a folder, or the prefix of a TensorFlow checkpoint, that exists, or NAME or "
    "NAME@REVISION of a model on the hub"
)
REASONS = {
    "GatedRepoError": "the hub gives it only to accounts that were granted access, by HF_TOKEN",
    "RepositoryNotFoundError": "the hub has none of that name, or it is private and HF_TOKEN may not read it",
    "RevisionNotFoundError": "the hub has no such revision of it",
    "OfflineModeIsEnabled": "it is not whole in the cache, and HF_HUB_OFFLINE is set",
}


def find_model(name, begun="", flag="init_checkpoint"):
    """The local folder of a model, downloaded where it is a name and not in the cache; logs which was taken.

    Args:
        name: Path, which wins where it exists; or NAME or NAME@REVISION; "" for no model.
        begun: NAME@COMMIT of the run that continues, whose commit then is that of NAME too.
        flag: Name of the setting that names the model.

    Raises:
        InputError: neither a path that exists nor a model that the hub gives, in safetensors.
    """
    name, rule = str(name), RULE.format(flag)
    match = NAME.fullmatch(name)
    if not name or Path(name).exists() or Path(f"{name}.index").is_file():
        if name and match:  # it might have been meant as a name
            logger.info("%s is the local folder %s", flag, os.path.abspath(name))
        return name
    if not match:
        raise InputError(f"{rule}. Received: {name}.")
    folder = _download(begun if begun.rpartition("@")[0] == name else name, rule)
    if not list(folder.glob("model*.safetensors")):
        raise InputError(f"{rule}, with model.safetensors. Received: {name}, without; a .bin is not read.")
    logger.info("%s is %s from the hub, in %s", flag, name_of(folder), folder)
    return str(folder)


def with_local_start(config, begun_flags, may_be_gone=False):
    """A config whose `init_checkpoint`, where it is a name on the hub, is the folder of its files here.

    A run that continues, by its `begun_flags`, {} for a start, keeps the commit that it began with. With
    `may_be_gone` it needs no files of it. Raises `InputError` as `find_model`.
    """
    given, begun = config.init_checkpoint, begun_flags.get("init_checkpoint", "")
    try:
        start = find_model(given, begun)
    except InputError:
        if not may_be_gone or given not in (begun, begun.rpartition("@")[0]):
            raise
        start = begun
    return dataclasses.replace(config, init_checkpoint=start)


def name_of(path):
    """NAME@COMMIT of a folder of the cache; other paths as they are."""
    match = SNAPSHOT.fullmatch(os.path.abspath(path)) if path else None
    return f"{match['repo'].replace('--', '/')}@{match['commit']}" if match else path


def recorded_flags(config):
    """The settings of a config: dict, with a model of the hub by name and commit, wherever its cache is."""
    flags = dataclasses.asdict(config)
    if "init_checkpoint" in flags:
        flags["init_checkpoint"] = name_of(flags["init_checkpoint"])
    return flags


def in_cache(name):
    """The folder of NAME@COMMIT if the cache has it; else, and for a path, `name`. Asks no hub."""
    match = NAME.fullmatch(name)
    if not match or not match["revision"] or Path(name).exists():
        return name
    try:
        return str(_download(name, RULE, local_files_only=True))
    except InputError:
        return name


def push_folder(folder, name):
    """Upload a folder to a repository of models, made private where it is new; returns the commit's URL.

    Raises `InputError` where the hub does not take it; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    with asking("`push_to_hub` must be OWNER/NAME of a repository that HF_TOKEN may write to", name):
        HfApi().create_repo(name, private=True, exist_ok=True)
        return (
            HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="bert_packed").commit_url
        )


def _download(name, rule, **options):
    from huggingface_hub import snapshot_download  # half a second, and not for local folders

    repo, revision = NAME.fullmatch(name).group("repo", "revision")
    with asking(rule, name):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES, **options))


@contextlib.contextmanager
def asking(rule, name):
    """Turn every error of the client into an `InputError` of a line."""
    try:
        yield
    # The HTTP library below it raises kinds of another package, which changed between versions
    except Exception as error:
        raise InputError(f"{rule}. Received: {name}; {_reason(error)}.") from error


def _reason(error):
    """Why the hub gave nothing, in a line."""
    causes = [error]
    while causes[-1].__cause__:
        causes.append(causes[-1].__cause__)
    kinds = [kind.__name__ for cause in causes for kind in type(cause).__mro__]
    known = next((REASONS[kind] for kind in kinds if kind in REASONS), None)
    lines = str(causes[-1]).strip().splitlines() or [""]
    return known or f"{type(causes[-1]).__name__}: {lines[0]}".rstrip(".")


DATA_SET = re.compile(
    r"(hf://datasets/(?P<repo>[^/@,]+/[^/@,]+))(@(?P<revision>refs/(convert|pr)/\w+|[^/,]+))?/"
)
DATA_RULE = "a file of hf://datasets/OWNER/NAME[@REVISION]/ must be one that the hub gives"


def pin_data_sets(pattern):
    """Paths and globs with the commit of each data set of the hub: what is read twice is then the same.

    Raises `InputError` where the hub does not give a data set.
    """
    return DATA_SET.sub(_pin, pattern)


def _pin(match):
    from huggingface_hub import HfApi

    with asking(DATA_RULE, match[0]):
        return f"{match[1]}@{HfApi().dataset_info(match['repo'], revision=match['revision']).sha}/"


def is_on_hub(path):
    return str(path).startswith("hf://")


def data_sha256(path):
    """SHA-256 of a file of a data set as the hub knows it; "" for small files, of which it does not."""
    from huggingface_hub import HfFileSystem

    with asking(DATA_RULE, path):
        lfs = HfFileSystem().info(path).get("lfs")
        return lfs["sha256"] if lfs else ""
