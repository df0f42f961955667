"""How long the sequences of the GLUE tasks are, measured with our own tokenizer from the task files."""

from pathlib import Path

import numpy as np

from bert_packed.core.settings import InputError
from bert_packed.packing.histogram import count_lengths
from bert_packed.tasks.glue import TASKS, read_columns
from bert_packed.text.tokenization import encode_sentences, load_vocab, make_tokenizer


def measure_glue(glue_dir, vocab_file, max_seq_length):
    """Count the lengths of the training sequences of every task that is there.

    Args:
        glue_dir: Folder with `CoLA/train.tsv`, `SST-2/train.tsv`, ...
        vocab_file: WordPieces, one a line; text is lower-cased.
        max_seq_length: S; longer sequences count as S, truncated.

    Returns:
        Dict from "glue_cola", "glue_sst2", ... to int64 `[S]`.

    Raises:
        InputError: no task is there, or a file lacks its columns.
    """
    tokenizer = make_tokenizer(load_vocab(vocab_file), do_lower_case=True)
    histograms = {}
    for task in TASKS.values():
        path = Path(glue_dir) / task.name / "train.tsv"
        if path.exists():
            texts = read_columns(path, task.columns[:-1], task.has_torn_lines)
            lengths = np.ones(len(texts[0]), np.int64)  # [CLS]
            for column in texts:
                lengths += [len(ids) + 1 for ids in encode_sentences(tokenizer, column)]  # [SEP]
            name = f"glue_{task.name.replace('-', '').lower()}"
            histograms[name] = count_lengths(np.minimum(lengths, max_seq_length), max_seq_length)
    if not histograms:
        raise InputError(f"`glue_dir` must hold a task, such as CoLA/train.tsv. Received: {glue_dir}.")
    return histograms
