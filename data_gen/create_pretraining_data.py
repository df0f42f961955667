"""Command line: make pre-training records from text, for BERT or for causal language modeling."""

import sys

from bert_packed.core.command_line import print_table, run
from data_gen.text.create_config import CreateConfig

DESCRIPTION = """
Makes BERT pre-training records from text: masked sentence pairs in google-research/bert's format. With
--objective=causal_lm it makes pieces of documents with every next token as label, for models such as Mamba.

Without --input_file it reads the embedded sample corpus. OUTPUT_DIR receives train-*.tfrecord, with
--eval_fraction also eval-*.tfrecord, and vocab.txt, or tokenizer.json, and manifest.json.
"""


def main(config):
    """Create the records, and print what they hold."""
    from data_gen.text.create_job import create, summarize  # TensorFlow: not for --help

    print_table(summarize(create(config)), config.json)


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, CreateConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
