"""Whether the files that a run was made with are what they were then.

Of records the manifest beside them tells, of other files their bytes.
"""

import contextlib

from benchmarks.run_json import kept_flags, read_run_file
from bert_packed.core.files import file_sha256
from bert_packed.core.settings import InputError
from bert_packed.records.inputs import find_files, read_promises

RECORDS = ("input_file", "eval_input_file")  # flags of patterns of TFRecord files


def find_changed_input(output_dir):
    """A file that changed since a run was trained with it, or the run that it began from: its path, or None.

    Records that were added to those that the run's pattern matches count, and those that were taken away.
    Where a pattern matches nothing any more, nothing is said: what the run came to still stands. So is it of
    records that no manifest tells of: they are large, and the run's command reads every byte of them.

    Args:
        output_dir: Of a run, or any path.

    Raises:
        InputError: a manifest cannot be read.
    """
    flags = kept_flags(output_dir)
    if flags is None:
        return None
    for path, before, now in _inputs_before_and_now(output_dir, flags):
        if before != now:
            return path
    start = flags.get("init_checkpoint")
    return find_changed_input(start) if start else None


def checksum(path):
    """SHA-256 of a file, or None where it cannot be read."""
    try:
        return file_sha256(path)
    except OSError:
        return None


def _inputs_before_and_now(output_dir, flags):
    """Of the files of a run: yields (path, SHA-256 that run.json tells, SHA-256 now), None for no file."""
    for name, described in _described_inputs(output_dir).items():
        if name in RECORDS:
            files = _matching(flags.get(name) or "", name)
            for path in sorted(set(files) ^ set(described)) if files else ():
                yield path, described.get(path), None if path in described else "added"
            promised = {path: known.get("sha256") for path, known in read_promises(files).items()}
            now = {path: promised.get(path) for path in described}
        else:
            now = {path: checksum(path) for path in described}
        yield from ((path, before, now[path]) for path, before in described.items() if now[path])
    vocabulary = read_run_file(output_dir).get("data")
    if flags.get("vocab_file") and isinstance(vocabulary, dict) and "vocab_sha256" in vocabulary:
        now = checksum(flags["vocab_file"])
        yield flags["vocab_file"], vocabulary["vocab_sha256"], now or vocabulary["vocab_sha256"]


def _described_inputs(output_dir):
    """The files that a run read for its training: dict from flag to a dict from path to SHA-256."""
    inputs = read_run_file(output_dir).get("inputs")
    named = inputs.items() if isinstance(inputs, dict) else ()
    return {name: {entry["path"]: entry["sha256"] for entry in entries} for name, entries in named}


def _matching(pattern, name):
    """The files that a pattern matches; [] where it matches none."""
    with contextlib.suppress(InputError):
        return find_files(pattern, name)
    return []
