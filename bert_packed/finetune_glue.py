"""Command line: fine-tune a packed BERT on GLUE, one task or all, and score it with each task's metrics."""

import sys

from bert_packed.core.command_line import run
from bert_packed.tasks.config import GlueConfig
from bert_packed.tasks.registry import finetune

DESCRIPTION = """
Fine-tunes a packed BERT on texts or pairs of texts. It learns the classes of CoLA, SST-2, MRPC, QQP, MNLI,
QNLI, RTE and WNLI, and the number of STS-B.

DATA_DIR holds the official train.tsv and dev.tsv. OUTPUT_DIR receives checkpoints, metrics.csv and, from
dev.tsv, predictions.tsv and eval_results.json. With --do_predict it also receives the file that GLUE's server
takes, such as MRPC.tsv, from test.tsv. The same command continues a stopped run. Every step takes
train_batch_size sequences, the same ones whether they are packed or not (--max_sequences_per_pack=1).

--task_name=all does this for each task whose folder is in DATA_DIR, one after the other. It ends with one
table and the average as GLUE counts it. Tasks that are finished are not done again.
"""


def main(config):
    """Train, predict and score; returns an exit status."""
    return finetune(config).exit_status


def command():
    """Run `main` with the flags of the command line; returns the exit status."""
    return run(main, GlueConfig, DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
