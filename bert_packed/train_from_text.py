"""Command line: from text to a trained, audited model in the form of Hugging Face."""

import sys

from bert_packed.core.command_line import run
from bert_packed.text_to_model.config import TrainConfig
from bert_packed.text_to_model.steps import train

DESCRIPTION = """
Makes a model from text with one command. It makes a vocabulary, instances with a held-out split, and packs,
and proves that every sequence is in them once. It trains a masked language model with other masks in every
epoch, and audits that no sequence of a pack sees another. Then it exports the model for transformers and
load_encoder.

The same command continues after a kill and leaves out what is done. OUTPUT_DIR/flags has what was chosen, as
flagfiles of the single commands; a setting changed in pretrain.flags before training has saved is honored.

Exit status 1: the proof or the audit has found a fault.
"""


def main(config):
    """Take all steps; returns an exit status."""
    result = train(config)
    for sentence in result.failures:
        print(sentence, file=sys.stderr)
    return result.exit_status


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, TrainConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
