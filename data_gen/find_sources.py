"""Command line: which input records the sequences of one pack come from."""

import dataclasses
import sys

from data_gen.command_line import print_table, run
from data_gen.settings import InputError, check_settings, setting

DESCRIPTION = """
Traces a pack to its sources: prints the input file and record of each of its sequences, slot after slot.
The packs must have been made with pack_tfrecords.py --provenance.
"""


@dataclasses.dataclass(frozen=True)
class SourcesConfig:
    """Settings of one search; checks itself, raises `InputError`."""

    packed_file: str = setting("", "file of packs, with its .provenance.npz and manifest.json beside it")
    record_number: int = setting(1, "the pack's record in that file, from 1", minimum=1)
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if not self.packed_file:
            raise InputError("`packed_file` must be given. Received: ''.")


def main(config):
    """Look the pack up, and print a row for each of its sequences."""
    from data_gen.provenance import find_sources  # NumPy: not for --help

    sources = find_sources(config.packed_file, config.record_number)
    rows = [
        {"slot": slot, "input file": path, "record": number} for slot, (path, number) in enumerate(sources, 1)
    ]
    print_table(rows, config.json)


if __name__ == "__main__":
    sys.exit(run(main, SourcesConfig, DESCRIPTION))
