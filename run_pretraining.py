"""Command line: pre-train a packed BERT, or a packed Mamba; the row `pretrain` of `bert_packed.cli`."""

import sys

from bert_packed.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("pretrain"))
