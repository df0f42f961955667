"""Command line: find the input records and documents of a pack's sequences."""

import dataclasses
import functools
import sys

from bert_packed.cli import run_command
from bert_packed.core import storage
from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError, check_settings, setting


@dataclasses.dataclass(frozen=True)
class SourcesConfig:
    """Traces a pack to its sources: prints the input file and record of each of its sequences, slot after
    slot. The packs must have been made with pack_tfrecords.py --provenance, and input files that are
    still there must be as they were then. It also prints text files and documents if the input records
    were made with create_pretraining_data.py --provenance, and are still there. A document has its
    number in its file, from 1, and the line where it begins, if the text is there as it was.
    """

    packed_file: str = setting("", "file of packs, with its .provenance.npz and manifest.json beside it")
    record_number: int = setting(1, "the pack's record in that file, from 1", minimum=1)
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if not self.packed_file:
            raise InputError("`packed_file` must be given. Received: ''.")


def main(config):
    """Look the pack up, and print a row for each of its sequences."""
    from bert_packed.records.provenance import find_documents, find_sources  # NumPy: not for --help

    sources = find_sources(config.packed_file, config.record_number)
    rows = [
        {"slot": slot, "input file": storage.printable(path), "record": number}
        for slot, (path, number) in enumerate(sources, 1)
    ]
    documents = find_documents(sources, config.packed_file)
    if any(documents):
        for row, document in zip(rows, documents, strict=True):
            row["text file"] = storage.printable(document.path) if document else ""
            row["document"] = document.number if document else ""
            row["line"] = (find_line_of(document) if document else None) or ""
    print_table(rows, config.json)


file_sha256 = functools.cache(storage.file_sha256)


@functools.cache
def find_line_of(document):
    """The line where a `Document` begins; None where its text is missing or has changed."""
    from data_gen.text import corpus

    if not storage.is_file(document.path) or file_sha256(document.path) != document.sha256:
        return None
    return corpus.find_line(document.path, document.number)


if __name__ == "__main__":
    sys.exit(run_command("find"))
