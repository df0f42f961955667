"""Command line: pack BERT pre-training records, several sequences to a pack, without padding between them."""

import sys

from data_gen.command_line import print_table, run
from data_gen.pack_config import PackConfig

DESCRIPTION = """
Packs BERT pre-training records: several sequences in one record of fixed length, next to no padding.

Without --input_file it packs the embedded sample corpus. With it, OUTPUT_DIR receives
packed-*.tfrecord and manifest.json.
"""


def main(config):
    """Pack, and print the papers' metrics."""
    from data_gen.pack_files import metrics_row, pack  # TensorFlow: not for --help

    if config.input_file:
        rows = [metrics_row(pack(config))]
    else:
        from data_gen.sample_data import pack_sample_corpus  # the tokenizer: only where text is read

        manifests = pack_sample_corpus(config)
        rows = [{"data": split, **metrics_row(manifest)} for split, manifest in manifests.items()]
    print_table(rows, config.json)


if __name__ == "__main__":
    sys.exit(run(main, PackConfig, DESCRIPTION))
