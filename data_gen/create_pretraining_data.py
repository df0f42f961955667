"""Command line: make pre-training records from text, for BERT or for causal language modeling."""

import sys

from bert_packed.cli import run_command
from bert_packed.core.command_line import print_table


def main(config):
    """Create the records, and print what they hold."""
    from data_gen.text.create_job import create, summarize  # slow to import: not for --help

    print_table(summarize(create(config)), config.json)


if __name__ == "__main__":
    sys.exit(run_command("create"))
