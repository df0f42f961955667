"""How a command's files appear in its output directory: all of them when complete, or none."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from data_gen.settings import InputError

MANIFEST_NAME = "manifest.json"
INCOMPLETE_NAME = ".incomplete"
OWN_PATTERNS = ("*.tfrecord", MANIFEST_NAME, "vocab.txt")  # what --overwrite may replace


class OutputDir:
    """The folder in which a command collects its files until all are complete."""

    def __init__(self, folder):
        self._folder = folder

    def path(self, name):
        """Where to write the file that will be `name`: str."""
        return str(self._folder / name)

    def write_manifest(self, content):
        """Write `manifest.json`, which becomes visible after all other files."""
        # a line per key: indentation would give every number of a histogram its own
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        self._folder.joinpath(MANIFEST_NAME).write_text("{\n" + ",\n".join(lines) + "\n}\n")


@contextlib.contextmanager
def open_output_dir(path, overwrite=False):
    """Collect files in `path/.incomplete` and move them to their names when the block ends well.

        with open_output_dir("packs") as output:
            write_records(output.path("packed-00000-of-00001.tfrecord"), records)
            output.write_manifest(manifest)

    After an error nothing of the block is left. After a kill, `.incomplete` is left and the next run removes
    it. The manifest comes last, so a directory with a manifest is complete.

    Args:
        path: Directory; made where it is missing.
        overwrite: Whether a directory in use may be replaced. Its old `*.tfrecord`, `manifest.json` and
            `vocab.txt` stay until the new files are complete; other files stay for good.

    Yields:
        `OutputDir`.

    Raises:
        InputError: the directory is in use and not to be overwritten, another run writes to it, or it is
            a file.
    """
    final = Path(path)
    if final.exists() and not final.is_dir():
        raise InputError(f"`output_dir` must be a directory. Received: {final}, which is a file.")
    is_new = not final.exists()
    final.mkdir(parents=True, exist_ok=True)
    with _lock(final):
        folder = final / INCOMPLETE_NAME
        if folder.exists():
            shutil.rmtree(folder)  # of a run that was killed: a living one would hold the lock
        in_use = sorted(entry.name for entry in final.iterdir())
        if in_use and not overwrite:
            raise InputError(
                f"`output_dir` must be empty unless --overwrite. Received: {final}, which holds {in_use[0]}."
            )
        folder.mkdir()
        try:
            yield OutputDir(folder)
            _publish(folder, final)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                _remove_if_empty(final)
            raise


def read_manifest(directory):
    """The `manifest.json` of a directory as a dict, or None where it has none.

    Raises:
        InputError: the file is not a JSON object.
    """
    path = Path(directory) / MANIFEST_NAME
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be JSON. Received: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must be a JSON object. Received: {type(content).__name__}.")
    return content


def refuse_own_input(input_files, directory):
    """Raise `InputError` where a command would replace its own input in `directory`."""
    directory = os.path.realpath(directory)
    for path in input_files:
        if os.path.dirname(os.path.realpath(path)) == directory:
            raise InputError(f"`output_dir` must not be the directory of an input file. Received: {path}.")


def _publish(folder, final):
    """Replace the old files of `final` by those in `folder`."""
    # Without its manifest a directory counts as incomplete: it goes first and comes last.
    old = [path for pattern in OWN_PATTERNS for path in final.glob(pattern)]
    for path in sorted(old, key=lambda path: path.name != MANIFEST_NAME):
        path.unlink()
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST_NAME, path.name)):
        path.replace(final / path.name)
    folder.rmdir()


@contextlib.contextmanager
def _lock(directory):
    """Hold a directory against other runs; the system frees it even where this one is killed."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"`output_dir` is being written by another run. Received: {directory}."
            ) from error
        yield
    finally:
        os.close(descriptor)


def _remove_if_empty(directory):
    with contextlib.suppress(OSError):  # someone else's file in it: then it is not ours to remove
        directory.rmdir()
