"""Input files: found by patterns, held to stamps and to the manifests beside them; scans that are kept."""

import contextlib
import glob
import json
import os

import numpy as np

from bert_packed.core import storage
from bert_packed.core.settings import InputError, is_utf8
from bert_packed.records.provenance import MANIFEST_NAME, SUFFIX, listed_files, read_manifest
from bert_packed.records.tfrecords import FileScan, scan_file

# Keys of a manifest that packs inherit: which vocabulary the token ids are of, and what is learnt from them
_VOCABULARY_KEYS = {"vocab_size": int, "vocab_sha256": str, "do_lower_case": bool, "tokenizer": str}
INHERITED_KEYS = {**_VOCABULARY_KEYS, "objective": str}  # in this order in a manifest, whose bytes it decides
FILE_KEYS = {"num_records": int, "sha256": str}  # and what the entry of a file promises
WRITERS = {"unpacked": "create_pretraining_data.py", "packed": "pack_tfrecords.py"}  # of manifests, by `kind`


def find_files(pattern, argument):
    """Find the files that comma-separated paths and globs name, as google-research/bert's flags do, sorted.

        "train-*.tfrecord,more/eval.tfrecord"     a glob and a path; `**` crosses folders
        "a,b.txt"                                 one file, where there is one of that name

    A glob matches no folder, and none of our own indexes, which `--provenance` leaves beside records. A comma
    may be part of a name: the whole pattern is tried as a name first, and a part that names nothing is tried
    together with the next. `argument` is the flag's name, for messages.
    """
    return check_found([path for _, paths in find_parts(pattern, argument) for path in paths], argument)


def find_parts(pattern, argument, match=None):
    """Cut a pattern as `find_files` does: yields each part and its files, in any order, found by `match`."""
    match = match or match_files
    parts = [pattern] if storage.is_file(pattern.strip()) else pattern.split(",")
    while parts:
        for count in range(1, len(parts) + 1):
            part = ",".join(parts[:count]).strip()
            if paths := match(part):
                break
        else:
            raise InputError(f"`{argument}` must match at least one file. Received: {parts[0].strip()!r}.")
        yield part, paths
        parts = parts[count:]


def match_files(part):
    """The files that one path or glob names: a file whose own name holds a bracket or a star is that file."""
    if storage.is_file(part):
        return [part]
    _refuse_lost_links(part)
    return [path for path in storage.match(part) if storage.is_file(path) and not path.endswith(SUFFIX)]


def _refuse_lost_links(pattern):
    # A disk that is not mounted would lose its files without a word. Folders may be links as well, as in */a
    while pattern and not storage.is_remote(pattern):
        for path in storage.match(pattern):
            if os.path.islink(path) and not os.path.exists(path):
                raise InputError(f"{path} must lead to a file. Received: a link to {os.readlink(path)}.")
        folder = os.path.dirname(pattern)
        pattern = folder if folder != glob.escape(folder) else ""


def check_found(paths, argument):
    """Files that were found, sorted, each once: one with two names, by a link, would be read twice."""
    found = sorted(set(paths))
    for path in found:
        if not is_utf8(path):
            raise InputError(f"`{argument}` must match names in UTF-8. Received: {path!r}.")
    found = _once_each(found, argument)
    for path in found:
        if storage.size_and_time(path)[0] == 0:
            raise InputError(f"`{argument}` must match files with content. Received: {path}, which is empty.")
    return found


def stamp_files(paths):
    """Stamps of files: list of [path, bytes, time of the last change in nanoseconds], plain JSON."""
    return [[path, *storage.size_and_time(path)] for path in paths]


@contextlib.contextmanager
def unchanged(stamps):
    """Raise `InputError` where files are not, before or after the block, as `stamp_files` found them.

    It comes in place of an `InputError` of the block, which half-changed files may cause.
    """
    inodes = {path: storage.inode(path) for path, _, _ in stamps}
    _check_stamps(stamps, inodes)
    try:
        yield
    except InputError:
        _check_stamps(stamps, inodes)
        raise
    _check_stamps(stamps, inodes)


def _check_stamps(stamps, inodes):
    for path, size, time in stamps:
        now_size, now_time = storage.size_and_time(path)
        if (now_size, now_time, storage.inode(path)) != (size, time, inodes[path]):
            received = f"{now_size} bytes, before {size}" if now_size != size else "a change, or another file"
            raise InputError(f"{path} must stay as it is while it is read. Received: {received}.")


def read_input_manifests(paths):
    """Facts of manifests beside files: dict of the `INHERITED_KEYS` that are known, and `read_promises`."""
    known = {folder: _known(manifest, INHERITED_KEYS) for folder, manifest in _manifests_beside(paths)}
    folder, vocabulary = next(iter(known.items()), ("", {}))
    for other, found in known.items():
        if found != vocabulary:
            raise InputError(
                f"all inputs must have one vocabulary and objective. Received: {folder}: {vocabulary}; "
                f"{other}: {found}."
            )
    return vocabulary, read_promises(paths)


def read_promises(paths):
    """Promises of manifests about files beside them: dict from path to the known ones of `FILE_KEYS`."""
    promised = {}
    for directory, manifest in _manifests_beside(paths):
        for entry in listed_files(manifest):
            promised[os.path.join(directory, entry["name"])] = _known(entry, FILE_KEYS)
    return {path: promised[_key(path)] for path in paths if _key(path) in promised}


def check_promises(promised, path, num_records, sha256):
    """Raise `InputError` where a file is not what was `promised` of it, by `read_promises`."""
    # the number is compared first, as its message says more: files lost whole records, or have some twice
    for key, rule, received in (
        ("num_records", "hold {} records", num_records),
        ("sha256", "have the SHA-256 {}", sha256),
    ):
        if (wanted := promised.get(key)) not in (None, received):
            rule = f"{rule.format(wanted)}, as the manifest.json beside it says"
            raise InputError(f"{path} must {rule}. Received: {received}.")


def folder_of(path):
    """The folder that holds a file, local or behind a URL, where its manifest is."""
    # a `Path` would make gs://b into gs:/b, which is no file at all and has no manifest
    head = str(path).rpartition("/")[0]
    if head.endswith(":/"):  # memory://a.tfrecord: nothing but the scheme is before the name
        return f"{head}/"
    return os.path.dirname(path) or "."


def _once_each(paths, argument):
    """Leave out other spellings of a path that is there already; `InputError` for other names of a file."""
    kept = {}
    for path in paths:
        if storage.is_remote(path):
            # An object store may hold ./a and a as two objects, so neither may be left out in silence
            scheme, _, rest = path.partition("://")
            identity, spelling = f"{scheme}://{os.path.normpath(rest)}", path
        else:
            status = os.stat(path)
            identity, spelling = (status.st_dev, status.st_ino), os.path.abspath(path)
        other, other_spelling = kept.setdefault(identity, (path, spelling))
        if spelling != other_spelling:
            raise InputError(
                f"`{argument}` must name each file once. Received: {other} and {path}, which are one file."
            )
    return [path for path, _ in kept.values()]


def _manifests_beside(paths):
    """The manifests of the folders that hold files: yields (folder, dict)."""
    for directory in sorted({folder_of(path) for path in paths}):
        manifest = read_manifest(directory, any_json=True)
        if manifest is not None:
            if kind := _kind_of(manifest):
                _check_form(manifest, kind, os.path.join(directory, MANIFEST_NAME))
            yield directory, manifest


def read_own_manifest(directory, kind):
    """The manifest, in its form for `kind` of `WRITERS`, of a directory that only we write, or None."""
    manifest = read_manifest(directory)
    if manifest is not None:
        _check_form(manifest, kind, os.path.join(directory, MANIFEST_NAME))
    return manifest


def _kind_of(manifest):
    """The kind, one of `WRITERS`, of a manifest that may be broken in form; None for another program's."""
    written = manifest.get("kind")
    # Taken for another program's, a broken one of ours would promise nothing and switch all checks off
    if written not in list(WRITERS) and not {"settings", "versions"} <= manifest.keys():
        return None
    return "unpacked" if written == "unpacked" or "splits" in manifest else "packed"


def _check_form(manifest, kind, path):
    """Raise `InputError` for a manifest of ours that is not as we write it."""
    try:
        groups = list(manifest["splits"].values()) if kind == "unpacked" else [manifest]
        entries = [entry for group in groups for entry in group["files"]]
        found = [(entry, key, form) for entry in entries for key, form in {"name": str, **FILE_KEYS}.items()]
        found += [(manifest, key, form) for key, form in INHERITED_KEYS.items() if key in manifest]
        wrong = [f"{key}={part[key]!r:.80}" for part, key, form in found if type(part[key]) is not form]
        wrong += [] if manifest.get("kind") == kind else [f"kind={manifest.get('kind')!r:.80}"]
        wrong += [] if groups else ["no split"]
    except (KeyError, TypeError, AttributeError) as error:
        wrong = [f"no {error}" if isinstance(error, KeyError) else str(error)]
    if wrong:
        raise InputError(
            f"{path}: what {WRITERS[kind]} writes must be there, in its form. Received: {wrong[0]}."
        )


def _key(path):
    return os.path.join(folder_of(path), os.path.basename(path))


def _known(content, kinds):
    """Values of an object under our keys, if of the type that we write; others are another program's."""
    return {key: content[key] for key, kind in kinds.items() if type(content.get(key)) is kind}


# Scans of whole files are kept with a stamp of each, so that later starts need not read them again: size,
# time of the last change, inode and, of a local file, the time at which anything of it last changed, which no
# program sets back. So it sees a file that was written again with as many bytes, one that was replaced, and
# one whose time was set back (`touch -r`, `cp -p`, `rsync -t`). It does not see
#
# - bytes that change below the file system, on a failing disk: the checksum within each record sees them when
#   the record is read;
# - a second change within one tick of the file system's clock: some milliseconds, on old ones a second;
# - of a URL: a change to which the store gives the same size and time. A store that gives no time has no
#   stamps, and its files are read each time.
SCANS_FORMAT = 1


def scan_unchanged(path):
    """Scan a file: `FileScan`, and the stamp of the file; `InputError` where it changes meanwhile."""
    stamp = stamp_of(path)
    with unchanged([[path, stamp[0], stamp[1]]]):
        return scan_file(path), stamp


def stamp_of(path):
    """Stamp of a file: [bytes, time of the last change, inode, time of any change], in nanoseconds."""
    return [*storage.size_and_time(path), storage.inode(path), storage.change_time(path)]


def write_scans(store, scans):
    """Keep scans of undamaged files, path -> result of `scan_unchanged`, in the place of older ones."""
    scans = {path: (scan, stamp) for path, (scan, stamp) in scans.items() if stamp[1]}
    facts = [[path, stamp, scan.sha256, scan.num_records] for path, (scan, stamp) in scans.items()]
    # Sizes mostly take two bytes a record, where offsets take eight
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(scan.offsets) for scan, _ in scans.values())])
    header = json.dumps({"format": SCANS_FORMAT, "files": facts}).encode()
    with storage.write_whole(store) as partial, storage.open_file(partial, "wb") as file:
        np.savez(
            file,
            header=np.frombuffer(header, np.uint8),
            sizes=sizes.astype(np.min_scalar_type(int(sizes.max(initial=0)))),
        )


def read_scans(store, paths):
    """The scans in a store of files that are as they were: dict from some paths to `FileScan` and stamp.

    A store that is missing, damaged, of another version, or that cannot be read, holds none.
    """
    kept = _read_store(store)
    return {path: kept[path] for path in paths if path in kept and kept[path][1] == stamp_of(path)}


def read_checksums(store):
    """The SHA-256 of every file in a store, whatever has become of the file: dict from path."""
    return {path: scan.sha256 for path, (scan, _) in _read_store(store).items()}


def _read_store(store):
    try:
        with storage.open_file(store) as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header["format"] != SCANS_FORMAT:
                return {}
            sizes = arrays["sizes"]  # read whole: the archive's own checksum is compared then
        kept, first = {}, 0
        for path, stamp, sha256, num_records in header["files"]:
            offsets = np.zeros(num_records + 1, np.int64)
            np.cumsum(sizes[first : first + num_records], out=offsets[1:])
            kept[path] = FileScan(sha256, num_records, offsets), stamp
            first += num_records
        return kept
    except Exception:  # what damage raises has no end: BadZipFile, NotImplementedError, MemoryError, OSError
        return {}
