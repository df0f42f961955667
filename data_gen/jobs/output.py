"""Output directories: a command's files appear there all together when complete, or not at all.

Until then they are in `.incomplete`, with a note of the run that makes them. A user's mistake leaves nothing
of it. A run that was killed, interrupted, or failed for another reason, leaves it, and the same one goes on.
"""

import contextlib
import dataclasses
import json
import logging
import os

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.manifests import MANIFEST_NAME, is_of_scans, read_manifest

INCOMPLETE_NAME = ".incomplete"
WORK_NAME = "work"  # within it: what is not to be published
IDENTITY_NAME = "identity.json"  # within that: which run this is
PUBLISH_NAME = "publish.json"  # and which names it is about to publish
OWN_SUFFIXES = (".tfrecord", ".provenance.npz")  # what --overwrite may replace, with the scans and these:
OWN_NAMES = (MANIFEST_NAME, "vocab.txt", "tokenizer.json")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OutputDir:
    """The folder in which a command collects its files until all are complete.

    Attributes:
        folder: Path.
        manifest: None, or the manifest where an earlier run had finished all and was killed while its files
            received their names. Then there is nothing left to do.
    """

    folder: str
    manifest: dict | None = None

    def path(self, name):
        """The path to write to of the file that will be `name`."""
        return os.path.join(self.folder, name)

    @property
    def work_folder(self):
        """Folder for whatever the command needs until it is complete."""
        return self.path(WORK_NAME)

    def write_manifest(self, content):
        """Write `manifest.json`, which becomes visible after all other files."""
        # a line per key: indentation would give every number of a histogram its own
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        storage.write_text(self.path(MANIFEST_NAME), "{\n" + ",\n".join(lines) + "\n}\n")


@contextlib.contextmanager
def open_output_dir(path, overwrite, identity):
    """Collect files in `path/.incomplete` and move them to their names when the block ends well.

        with open_output_dir("packs", overwrite, identity) as output:
            if output.manifest is None:
                write_records(output.path("packed-00000-of-00001.tfrecord"), records)
                output.write_manifest(manifest)

    After a user's mistake nothing of the block is left, unless its files are on their way to their names.
    After a kill, Ctrl-C or another error, such as a full disk, `.incomplete` is left: the next run of equal
    identity finds it as it was, any other removes it. The manifest comes last, so a directory with a manifest
    is complete.

    Args:
        path: Directory; made where it is missing.
        overwrite: Whether a directory in use may be replaced. Its old records, `manifest.json` and
            `vocab.txt` stay until the new files are complete; other files stay for good.
        identity: Dict of all that the files depend on, as plain JSON.

    Yields:
        `OutputDir`.

    Raises:
        InputError: the directory is in use and not to be overwritten, another run writes to it, or it is
            a file.
        What the block raises, with a note that the same command continues where that is so.
    """
    final = os.fspath(path)
    if storage.is_file(final):
        raise InputError(f"`output_dir` must be a directory. Received: {final}, which is a file.")
    if storage.printable(final) != final:
        raise InputError(
            "`output_dir` must have a name in UTF-8, which is all that TensorFlow writes to. "
            f"Received: {storage.printable(final)}."
        )
    identity = json.loads(json.dumps(identity))  # as a reader finds it: tuples are lists
    is_new = not storage.exists(final)
    storage.make_folder(final)
    with storage.lock(final, f"`output_dir` is being written by another run. Received: {final}."):
        folder = os.path.join(final, INCOMPLETE_NAME)
        # of a run that was killed: a living one would hold the lock
        is_same = _read_identity(folder) == identity
        is_publishing = is_same and _is_publishing(folder)
        names = storage.list_names(final)
        in_use = [name for name in names if name != INCOMPLETE_NAME and not is_of_scans(name)]
        if in_use and not overwrite and not is_publishing:
            # before anything is removed: the rest of a half-published run may be in `.incomplete`
            raise InputError(
                f"`output_dir` must be empty unless --overwrite. Received: {final}, which holds {in_use[0]}."
            )
        if not is_same:
            _say_what_differs(folder, identity)
            _discard(folder)
        try:
            _prepare(folder, identity)
            manifest = (read_manifest(folder) or read_manifest(final)) if is_publishing else None
            yield OutputDir(folder, manifest)
            _publish(folder, final)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the first error is the one to report
                # While they get their names, the old files may be gone already
                is_kept = _read_identity(folder) == identity and not isinstance(error, InputError)
                if is_kept or _is_publishing(folder):
                    error.add_note(f"the same command continues with what is in {folder}")
                else:
                    _discard(folder)
            if is_new:
                _remove_if_empty(final)
            raise


def refuse_own_input(input_files, directory):
    """Raise `InputError` where a command would replace its own input in `directory`."""
    directory = _real_path(directory)
    for path in input_files:
        if os.path.dirname(_real_path(path)) == directory:
            raise InputError(f"`output_dir` must not be the directory of an input file. Received: {path}.")


def _real_path(path):
    """A path without links; a URL as it is, because `os.path` would take it for a local path."""
    return str(path).rstrip("/") if storage.is_remote(path) else os.path.realpath(path)


def _is_publishing(folder):
    """Whether the files in `.incomplete` are complete and on their way to their names."""
    return storage.exists(os.path.join(folder, WORK_NAME, PUBLISH_NAME))


def _read_identity(folder):
    """The identity of the run that `.incomplete` is of, or None."""
    try:
        return storage.read_json(os.path.join(folder, WORK_NAME, IDENTITY_NAME), default=None)
    except InputError:  # not what a run writes: nobody's
        return None


def _say_what_differs(folder, identity):
    """Log why an unfinished run is not continued."""
    found = _read_identity(folder)
    if found is not None:
        names = [name for name in identity | found if identity.get(name) != found.get(name)]
        logger.warning("%s is of a run with other %s: starting over", folder, ", ".join(names))


def _prepare(folder, identity):
    work = os.path.join(folder, WORK_NAME)
    storage.make_folder(work)
    for place in (folder, work):  # what killed steps left: room on the disk
        for name in storage.list_names(place):
            if name.endswith(storage.PARTIAL_SUFFIX):
                storage.remove(os.path.join(place, name))
    storage.write_text(os.path.join(work, IDENTITY_NAME), json.dumps(identity, sort_keys=True) + "\n")


def _publish(folder, final):
    """Replace the old files of `final` by those in `folder`; may be killed and called again at any point."""
    plan = os.path.join(folder, WORK_NAME, PUBLISH_NAME)
    if not storage.exists(plan):
        names = [name for name in storage.list_names(folder) if name != WORK_NAME]
        names = [name for name in names if not name.endswith(storage.PARTIAL_SUFFIX)]  # of a killed step
        storage.write_text(plan, json.dumps(sorted(names, key=_manifest_last)))
    names = storage.read_json(plan, list)
    left = [name for name in names if storage.exists(os.path.join(folder, name))]
    if left:
        # Without its manifest a directory counts as incomplete: it goes first and comes last.
        old = [name for name in storage.list_names(final) if _is_own(name)]
        for name in reversed(sorted(old, key=_manifest_last)):
            if name == MANIFEST_NAME or name not in names:
                storage.remove(os.path.join(final, name))
    for name in left:
        if name == MANIFEST_NAME:
            storage.flush_folder(final)  # or a power cut could keep the manifest's name and lose another
        storage.replace(os.path.join(folder, name), os.path.join(final, name))
    storage.flush_folder(final)
    _discard(folder)


def _discard(folder):
    """Remove `.incomplete`. Its identity goes first: what is left after a kill is nobody's."""
    identity = os.path.join(folder, WORK_NAME, IDENTITY_NAME)
    if storage.exists(identity):
        storage.remove(identity)
    storage.remove_folder(folder)


def _is_own(name):
    return name.endswith(OWN_SUFFIXES) or name in OWN_NAMES or is_of_scans(name)


def _manifest_last(name):
    return name == MANIFEST_NAME, name


def _remove_if_empty(directory):
    if storage.is_remote(directory):
        if not storage.list_names(directory):
            storage.remove_folder(directory)
        return
    with contextlib.suppress(OSError):  # someone else's file in it: then it is not ours to remove
        os.rmdir(directory)
