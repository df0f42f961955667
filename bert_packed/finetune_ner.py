"""Command line: fine-tune a packed BERT to tag words, tag a file with it, and score entities."""

import sys

from bert_packed.core.command_line import run
from bert_packed.finetuning import finetune
from bert_packed.runs.finetuning_config import NerConfig

DESCRIPTION = """
Fine-tunes a packed BERT to tag words, as named entities, and tags the words of a file.

TRAIN_FILE and PREDICT_FILE are of CoNLL's form: a word a line, columns separated by spaces or tabs, the tag
in the last, an empty line after each sentence. OUTPUT_DIR receives checkpoints, metrics.csv, labels.txt, the
tags by number, predictions.txt, which has the predicted tag after the word and its tag, and, where
PREDICT_FILE has tags, eval_results.json: accuracy, and of tags B-TYPE, I-TYPE and O precision, recall and F1
of exact entities as conlleval counts them. The same command continues a stopped run. Every step takes
train_batch_size sequences, the same ones whether they are packed or not (--max_sequences_per_pack=1).
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    return finetune(config).exit_status


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, NerConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
