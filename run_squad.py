"""Command line: fine-tune a packed BERT on SQuAD, answer questions with it, score the answers."""

import dataclasses
import sys

from bert_packed.core.command_line import run
from bert_packed.tasks.config import SquadConfig
from bert_packed.tasks.registry import finetune

DESCRIPTION = """
Fine-tunes a packed BERT to find answers in texts, and answers questions: SQuAD v1.1 and v2.0.

OUTPUT_DIR receives checkpoints, metrics.csv, predictions.json and nbest_predictions.json. It also receives
null_odds.json for v2.0, and eval_results.json where PREDICT_FILE has the right answers. The same command
continues a stopped run. Every step takes train_batch_size sequences, the same ones whether they are packed or
not (--max_sequences_per_pack=1).

Without train_file and predict_file it memorizes a few questions about this project:
--flagfile=squad.flags takes about two minutes on two cores.
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    config = config.resolved()
    if config.is_sample:
        config = _with_sample(config)
    return finetune(config).exit_status


def _with_sample(config):
    """The config with the questions about this project in place of files."""
    from data_gen.sample_questions import QUESTIONS_FILE, build_missing

    # A checkpoint's ids mean the WordPieces of the vocabulary beside it
    own_vocab = "" if config.vocab_file or config.init_checkpoint else build_missing(config.do_lower_case)
    return dataclasses.replace(
        config,
        train_file=str(QUESTIONS_FILE),
        predict_file=str(QUESTIONS_FILE),
        vocab_file=config.vocab_file or own_vocab,
        bert_config_file=config.bert_config_file or ("" if config.init_checkpoint else "bert-tiny"),
    )


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, SquadConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
