"""Command line: prove that packs hold every input sequence exactly once and their manifests are true."""

import dataclasses
import sys

from bert_packed.cli import run_command
from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError, check_settings, setting
from data_gen.pack_config import OVERLONG_CHOICES


@dataclasses.dataclass(frozen=True)
class VerifyConfig:
    """Proves that packs hold every sequence of their inputs exactly once. It compares tokens, sentence
    A/B, mask positions and labels, and next-sentence labels. Of records for causal language modeling
    it compares tokens, labels and the bytes of text that they cover.

    It also proves that the manifest.json beside the packs, if there is one, is true. It checks
    checksums, counts, histogram, plan, efficiency and the proven lower bound, and vocabulary and
    objective against the inputs' manifest. Exit status 0 if all is so. Exit status 1, with the first
    differences or what is false, if not or where a pack breaks the layout.
    """

    input_file: str = setting("", "unpacked TFRecords: comma-separated paths or globs")
    packed_file: str = setting("", "packs made of them: comma-separated paths or globs")
    overlong: str = setting(
        "manifest",
        "what packing did with sequences longer than the packs; manifest = as the manifest.json beside "
        "the packs says",
        choices=("manifest", *OVERLONG_CHOICES),
    )
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        for name in ("input_file", "packed_file"):
            if not getattr(self, name):
                raise InputError(f"`{name}` must be given. Received: ''.")


def main(config):
    """Compare, print the counts and the first differences; returns the exit status."""
    from bert_packed.records.inputs import find_files
    from data_gen.verification import compare_files, find_overlong  # slow to import: not for --help

    input_files = find_files(config.input_file, "input_file")
    packed_files = find_files(config.packed_file, "packed_file")
    overlong = find_overlong(packed_files) if config.overlong == "manifest" else config.overlong
    result = compare_files(input_files, packed_files, overlong)
    verdict = "malformed packs" if result.malformed else "equal" if result.is_equal else "different"
    if result.is_equal and result.false_claims:
        verdict = "false manifest"
    row = {
        "result": verdict,
        "input sequences": result.num_input_sequences,
        "packed sequences": result.num_packed_sequences,
        "missing": result.num_missing,
        "unexpected": result.num_unexpected,
    }
    print_table([row], config.json)
    for sentence in (*result.differences, *result.false_claims):
        print(sentence)
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(run_command("verify"))
