"""Files and folders, local or behind a URL: whole writes, locks, text and JSON.

What is behind URLs such as gs://, s3://, hdfs:// or hf:// is in `remote_files`.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path

from bert_packed.core import hub, remote_files
from bert_packed.core.settings import InputError

HASH_BYTES = 2**20  # read at once
PARTIAL_SUFFIX = ".partial"  # of what is not complete, or never became so
REPLACED_SUFFIX = f".replaced{PARTIAL_SUFFIX}"  # of a folder until its successor has its name
# These errors occur only in writing, and the system names no file in them
_NO_ROOM = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)
_NO_DEFAULT = object()


def is_remote(path):
    return "://" in str(path)


def printable(path):
    r"""A path as text that any output takes: a name that is not UTF-8, "\udcff" in Python, becomes "\xff"."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def open_file(path, mode="rb", buffering=-1):
    """Open a binary file: "rb" or "wb"; raises `OSError`. `buffering`, of `open`, is for local files."""
    if not is_remote(path):
        return open(path, mode, buffering)
    return remote_files.open_file(path, mode)


@contextlib.contextmanager
def naming_file(path):
    """Let every `OSError` of the block name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or str(path) in str(error):
            raise
        named = type(error)(f"{path}: {error}")
        named.errno = error.errno
        raise named from error


@contextlib.contextmanager
def _naming_written(path):
    """Let an error of the block that says that there is no room name what was written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        with naming_file(path):
            raise


@contextlib.contextmanager
def write_whole(path):
    """Write a file that appears under its name only when complete: yields the path to write to.

    When the block ends well it is on the disk and renamed; otherwise removed.
    """
    # The name is random: numbers of processes repeat among machines, and two must never write to one file
    partial = f"{path}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
    try:
        with _naming_written(path):
            yield partial
        if not is_remote(path):
            flush_to_disk(partial)  # or a power cut could leave the name without the content
        replace(partial, path)
        if not is_remote(path):
            flush_folder(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            remove(partial)
        raise


@contextlib.contextmanager
def write_folder(path):
    """`write_whole` for a local folder, in the place of an older one: yields PATH.partial, a `Path`."""
    final = Path(path)
    partial, replaced = (final.with_name(final.name + end) for end in (PARTIAL_SUFFIX, REPLACED_SUFFIX))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _naming_written(path):
            yield partial
        for written in (*partial.rglob("*"), partial):
            flush_to_disk(written)
        if final.exists():
            # The folder gets another name first: half-empty after a kill, it must not pass for complete
            final.rename(replaced)
        partial.rename(final)
        flush_folder(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def flush_to_disk(path):
    """Wait until a local file, or the names in a local folder, are on the disk; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path):
    """Wait until the names in a folder are on the disk, "" for the current one; no-op for a URL."""
    if is_remote(path):
        return
    try:
        flush_to_disk(path or ".")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise


def replace(source, target):
    """Rename a file, replacing what has that name; raises `OSError`."""
    if is_remote(source):
        remote_files.rename(source, target)
    else:
        os.replace(source, target)


def remove(path):
    """Remove a file; raises `OSError` where it cannot be removed or is missing."""
    if is_remote(path):
        remote_files.ask(path, "rm_file")
    else:
        os.remove(path)


def remove_folder(path):
    """Remove a folder with all that it holds; a missing one is fine, a link to one an `InputError`."""
    if not exists(path):
        return
    if is_remote(path):
        remote_files.remove_folder(path)
    elif os.path.islink(path):  # which `rmtree` refuses without a name
        raise InputError(f"a folder that is removed must not be a link. Received: {path}.")
    else:
        shutil.rmtree(path)


def make_folder(path):
    """Make a folder and those above it, where they are missing."""
    if is_remote(path):
        remote_files.ask(path, "makedirs", exist_ok=True)
    else:
        os.makedirs(path, exist_ok=True)


def exists(path):
    return bool(remote_files.info(path)) if is_remote(path) else os.path.exists(path)


def is_folder(path):
    return remote_files.info(path).get("type") == "directory" if is_remote(path) else os.path.isdir(path)


def is_file(path):
    return exists(path) and not is_folder(path)


def list_names(folder):
    """The names in a folder, sorted."""
    names = remote_files.ask(folder, "ls", detail=False) if is_remote(folder) else os.listdir(folder)
    return sorted(name.rstrip("/").rpartition("/")[2] for name in names)


def match(pattern):
    """The paths that a glob names; `**` crosses folders, on this machine only."""
    if not is_remote(pattern):
        return glob.glob(pattern, recursive=True)
    return remote_files.match(pattern)


def size_and_time(path):
    """Bytes of a file, and when it was last written, in nanoseconds; raises `OSError`."""
    if is_remote(path):
        if not (found := remote_files.info(path)):
            raise FileNotFoundError(f"{path}: no such file")
        # A commit in a path of the hub says which content it is
        time = None if hub.is_on_hub(path) else remote_files.ask(path, "modified")
        return int(found["size"]), int(time.timestamp() * 1e9) if time else 0
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def inode(path):
    """The number of a file in its file system, another one where it was replaced; 0 for URLs."""
    return 0 if is_remote(path) else os.stat(path).st_ino


def change_time(path):
    """When anything of a local file last changed, in nanoseconds, which no program sets back; 0 for URLs."""
    return 0 if is_remote(path) else os.stat(path).st_ctime_ns


def read_text(path):
    """The content of a UTF-8 file, without a byte-order mark; raises `InputError`, `OSError`."""
    with open_file(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} must be UTF-8. Received: {error}.") from error


def check_local(path, name):
    """Raise `InputError` where the folder of a setting `name` is a URL."""
    if is_remote(path):
        raise InputError(f"`{name}` must be a local folder. Received: {path}, a URL.")


def read_json(path, kind=dict, default=_NO_DEFAULT):
    """The content of a JSON file of a `kind`: dict, list, or object for any; `default` without such a one."""
    try:
        content = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError) as error:  # the second below what is a file
        if default is not _NO_DEFAULT:
            return default
        raise InputError(f"{path} must be JSON. Received: no such file.") from error
    except RecursionError as error:
        raise InputError(f"{path} must be JSON. Received: brackets nested too deeply.") from error
    except InputError:
        raise
    except ValueError as error:  # a number of thousands of digits is one too
        raise InputError(f"{path} must be JSON. Received: {error}.") from error
    if not isinstance(content, kind):
        wanted = {dict: "object", list: "array"}[kind]
        raise InputError(f"{path} must hold a JSON {wanted}. Received: {type(content).__name__}.")
    return content


def write_text(path, text):
    with write_whole(path) as partial, open_file(partial, "wb") as file:
        file.write(text.encode())


def write_json(path, content):
    """Write JSON that appears under its name only when complete, and the folders that it lacks."""
    make_folder(os.path.dirname(path) or ".")
    write_text(path, json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def lock(path, in_use):
    """Hold a local file, made where it is missing, or folder against other processes: yields its descriptor.

    The system frees it even where this process is killed. A URL is not locked, and yields None: an object
    store has no locks that a killed process would free. Where it is held, `in_use` is the message.
    """
    if is_remote(path):
        yield None
        return
    # A network file system locks only what is open for writing, which a folder cannot be. Behind a link there
    # may be anybody's file, and the holder of a lock may write to it
    flags = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputError(f"a file that is locked must not be a link. Received: {path}.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(in_use) from error
        yield descriptor
    finally:
        os.close(descriptor)


def file_sha256(path):
    """Hexadecimal SHA-256 of a file."""
    if hub.is_on_hub(path) and (known := hub.data_sha256(path)):
        return known
    digest = hashlib.sha256()
    with open_file(path) as file:
        while content := file.read(HASH_BYTES):
            digest.update(content)
    return digest.hexdigest()
