"""How long the sequences of the GLUE tasks are, measured with our own tokenizer from the task files."""

from pathlib import Path

import numpy as np

from data_gen.cli.settings import InputError
from data_gen.packing.histogram import count_lengths
from data_gen.tasks.glue import read_columns
from data_gen.text.tokenization import encode_sentences, load_vocab, make_tokenizer

# Folder and the columns of the texts; CoLA has no header, its text is the fourth column.
TASKS = {
    "cola": ("CoLA", (3,)),
    "sst2": ("SST-2", ("sentence",)),
    "mrpc": ("MRPC", ("#1 String", "#2 String")),
    "qqp": ("QQP", ("question1", "question2")),
    "stsb": ("STS-B", ("sentence1", "sentence2")),
    "mnli": ("MNLI", ("sentence1", "sentence2")),
    "rte": ("RTE", ("sentence1", "sentence2")),
    "wnli": ("WNLI", ("sentence1", "sentence2")),
}


def measure_glue(glue_dir, vocab_file, max_seq_length):
    """Count the lengths of the training sequences of every task that is there.

    Args:
        glue_dir: Folder with `CoLA/train.tsv`, `SST-2/train.tsv`, ...
        vocab_file: WordPieces, one a line; text is lower-cased.
        max_seq_length: S; longer sequences count as S, truncated.

    Returns:
        Dict from "glue_<task>" to int64 `[S]`.

    Raises:
        InputError: no task is there, or a file lacks its columns.
    """
    tokenizer = make_tokenizer(load_vocab(vocab_file), do_lower_case=True)
    histograms = {}
    for task, (folder, columns) in TASKS.items():
        path = Path(glue_dir) / folder / "train.tsv"
        if path.exists():
            texts = read_columns(path, columns)
            lengths = np.ones(len(texts[0]), np.int64)  # [CLS]
            for column in texts:
                lengths += [len(ids) + 1 for ids in encode_sentences(tokenizer, column)]  # [SEP]
            histograms[f"glue_{task}"] = count_lengths(np.minimum(lengths, max_seq_length), max_seq_length)
    if not histograms:
        raise InputError(f"`glue_dir` must hold a task, such as CoLA/train.tsv. Received: {glue_dir}.")
    return histograms
