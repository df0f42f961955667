"""Command line: fine-tune a packed BERT to tag words, tag a file with it, and score entities."""

import sys

from bert_packed.core.command_line import run
from bert_packed.tasks.config import NerConfig
from bert_packed.tasks.registry import finetune

DESCRIPTION = """
Fine-tunes a packed BERT to tag words, as named entities, and tags the words of a file.

TRAIN_FILE and PREDICT_FILE are of CoNLL's form: a word a line, with its tag in the last column. Spaces or
tabs separate columns, and an empty line ends each sentence. OUTPUT_DIR receives checkpoints, metrics.csv,
labels.txt and predictions.txt. labels.txt has the tags by number; predictions.txt has each word, its tag and
the predicted tag. Where PREDICT_FILE has tags, OUTPUT_DIR also receives eval_results.json with the accuracy.
For tags B-TYPE, I-TYPE and O it has precision, recall and F1 of exact entities too, as conlleval counts them.
The same command continues a stopped run. Every step takes train_batch_size sequences, the same ones whether
they are packed or not (--max_sequences_per_pack=1).
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    return finetune(config).exit_status


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, NerConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
