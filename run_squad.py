"""Command line: fine-tune a packed BERT on SQuAD; the row `squad` of `bert_packed.cli`."""

import sys

from bert_packed.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("squad"))
