"""Command line: make BERT pre-training records (masked LM and next sentence) from text."""

import sys

from data_gen.cli.command_line import print_table, run
from data_gen.text.create_config import CreateConfig

DESCRIPTION = """
Makes BERT pre-training records from text: sentence pairs, masked, in google-research/bert's format.

Without --input_file it reads the embedded sample corpus. OUTPUT_DIR receives train-*.tfrecord, with
--eval_fraction also eval-*.tfrecord, and vocab.txt and manifest.json.
"""


def main(config):
    """Create the records, and print what they hold."""
    from data_gen.text.create_job import create, summarize  # TensorFlow: not for --help

    print_table(summarize(create(config)), config.json)


if __name__ == "__main__":
    sys.exit(run(main, CreateConfig, DESCRIPTION))
