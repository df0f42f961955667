"""Output directories, in which all files of a command appear together when complete, or not at all.

Until then they are in `.incomplete`, with the identity of the run that makes them. After a user's error that
folder is removed. After a kill, an interrupt or another error it stays, and the same command continues.
"""

import contextlib
import dataclasses
import json
import logging
import os

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.records.provenance import MANIFEST_NAME, is_of_scans, read_manifest

INCOMPLETE_NAME = ".incomplete"
WORK_NAME = "work"  # the run's folder in that, for files that are not published yet
IDENTITY_NAME = "identity.json"  # the file there with the identity of the run
PUBLISH_NAME = "publish.json"  # the file there with the names that the run is about to publish
OWN_SUFFIXES = (".tfrecord", ".provenance.npz")  # --overwrite may replace these, scans, and
OWN_NAMES = (MANIFEST_NAME, "vocab.txt", "tokenizer.json")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OutputDir:
    """The folder in which a command collects its files until all are complete."""

    folder: str
    # The manifest is not None where an earlier, complete run was killed as it renamed files: no work is left
    manifest: dict | None = None

    def path(self, name):
        return os.path.join(self.folder, name)

    @property
    def work_folder(self):
        """Temporary files of the command."""
        return self.path(WORK_NAME)

    def write_manifest(self, content):
        """Write `manifest.json`, which becomes visible after all other files."""
        # a line per key: `indent` would write every number of a histogram on its own line
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        storage.write_text(self.path(MANIFEST_NAME), "{\n" + ",\n".join(lines) + "\n}\n")


@contextlib.contextmanager
def open_output_dir(path, overwrite, identity):
    """Context manager for an `OutputDir`, whose files are moved to `path` when the block has succeeded.

        with open_output_dir("packs", overwrite, identity) as output:
            if output.manifest is None:
                write_records(output.path("packed-00000-of-00001.tfrecord"), records)
                output.write_manifest(manifest)

    After an `InputError` of the block, `path/.incomplete` is removed, unless its files are already being
    moved. After a kill or another error it stays: the next run with equal `identity`, plain JSON of
    everything that the files depend on, continues in it, any other removes it. With `overwrite`, old
    records, manifest and vocabulary stay until the new files are complete; other files are kept.
    """
    final = os.fspath(path)
    if storage.is_file(final):
        raise InputError(f"`output_dir` must be a directory. Received: {final}, which is a file.")
    if storage.printable(final) != final:
        raise InputError(
            "`output_dir` must have a name in UTF-8, which is all that TensorFlow writes to. "
            f"Received: {storage.printable(final)}."
        )
    identity = json.loads(json.dumps(identity))  # tuples become lists, as in the file
    is_new = not storage.exists(final)
    storage.make_folder(final)
    with storage.lock(final, f"`output_dir` is being written by another run. Received: {final}."):
        folder = os.path.join(final, INCOMPLETE_NAME)
        # a killed run has left it, since a live one would hold the lock
        found = _read_identity(folder)
        is_same = found == identity
        is_publishing = is_same and _is_publishing(folder)
        names = storage.list_names(final)
        in_use = [name for name in names if name != INCOMPLETE_NAME and not is_of_scans(name)]
        if in_use and not overwrite and not is_publishing:
            # nothing is removed before this: the rest of a half-published run may be in `.incomplete`
            raise InputError(
                f"`output_dir` must be empty unless --overwrite. Received: {final}, which holds {in_use[0]}."
            )
        if is_publishing and (wrong := _wrong_in_plan(folder, final)):
            if not overwrite:
                raise InputError(f"{wrong}; --overwrite starts over.")
            is_publishing = False
            _discard(folder)
        if not is_same:
            if found is not None:
                differing = (name for name in identity | found if identity.get(name) != found.get(name))
                logger.warning("%s is of a run with other %s: starting over", folder, ", ".join(differing))
            _discard(folder)
        try:
            _prepare(folder, identity)
            manifest = (read_manifest(folder) or read_manifest(final)) if is_publishing else None
            yield OutputDir(folder, manifest)
            _publish(folder, final)
        except BaseException as error:
            with contextlib.suppress(OSError):  # report the first error, not one from cleaning up
                # While files are moved, the old ones may be gone already
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
    """A path without links; a URL unchanged, since `os.path` would treat it as a local path."""
    return str(path).rstrip("/") if storage.is_remote(path) else os.path.realpath(path)


def _is_publishing(folder):
    """True if the files in `.incomplete` are complete and being moved to their names."""
    return storage.exists(os.path.join(folder, WORK_NAME, PUBLISH_NAME))


def _read_identity(folder):
    """The identity of the run that made `.incomplete`, or None."""
    try:
        return storage.read_json(os.path.join(folder, WORK_NAME, IDENTITY_NAME), default=None)
    except InputError:  # not written by a run
        return None


def _prepare(folder, identity):
    work = os.path.join(folder, WORK_NAME)
    storage.make_folder(work)
    for place in (folder, work):  # partial files of killed steps would only take disk space
        for name in storage.list_names(place):
            if name.endswith(storage.PARTIAL_SUFFIX):
                storage.remove(os.path.join(place, name))
    storage.write_text(os.path.join(work, IDENTITY_NAME), json.dumps(identity, sort_keys=True) + "\n")


def _finished(folder):
    """The names in `.incomplete` that are to be published, that of the manifest last."""
    names = [name for name in storage.list_names(folder) if name != WORK_NAME]
    names = [name for name in names if not name.endswith(storage.PARTIAL_SUFFIX)]  # left by killed steps
    return sorted(names, key=_manifest_last)


def _wrong_in_plan(folder, final):
    """The rule that the names which a killed run was publishing break, as a sentence; "" for none."""
    plan, left = os.path.join(folder, WORK_NAME, PUBLISH_NAME), _finished(folder)
    names = storage.read_json(plan, list)
    # Only names that a listing gives are ours: "../a" would lead out of the folder
    there = [*left, *storage.list_names(final)]
    wrong = [name for name in names if name not in there]
    wrong += [name for name in (MANIFEST_NAME, *left) if name not in names]
    if not wrong:
        return ""
    return (
        f"{plan} must name the files of the run, which are in {folder} or published. "
        f"Received: {wrong[0]!r}, which is {'not there' if wrong[0] in names else 'left out'}"
    )


def _publish(folder, final):
    """Replace the old files of `final` by those in `folder`; can be killed at any point and called again."""
    plan, left = os.path.join(folder, WORK_NAME, PUBLISH_NAME), _finished(folder)
    if not storage.exists(plan):
        storage.write_text(plan, json.dumps(left))
    names = storage.read_json(plan, list)
    if left:
        # A directory without its manifest counts as incomplete, so it is removed first and moved last
        old = [name for name in storage.list_names(final) if _is_own(name)]
        for name in reversed(sorted(old, key=_manifest_last)):
            if name == MANIFEST_NAME or name not in names:
                storage.remove(os.path.join(final, name))
    for name in left:
        if name == MANIFEST_NAME:
            storage.flush_folder(final)  # else a power cut could keep the manifest's name and lose another
        storage.replace(os.path.join(folder, name), os.path.join(final, name))
    storage.flush_folder(final)
    _discard(folder)


def _discard(folder):
    # Its identity goes first, so that no run continues with what a kill may leave
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
    with contextlib.suppress(OSError):  # not empty: another program has written a file there
        os.rmdir(directory)
