"""Settings of fine-tuning to tag words."""

import dataclasses

from bert_packed.architectures.registry import WEIGHTINGS
from bert_packed.core.settings import InputError, setting, variant
from bert_packed.runs.run_config import DATA, OPTIMIZER, PREDICTION
from bert_packed.tasks.config import FinetuneConfig, ScoredConfig, check_files


@dataclasses.dataclass(frozen=True)
class NerConfig(ScoredConfig):
    """Fine-tunes a packed BERT to tag words, as named entities, and tags the words of a file.

    TRAIN_FILE and PREDICT_FILE are of CoNLL's form: a word a line, with its tag in the last column.
    Spaces or tabs separate columns, and an empty line ends each sentence. OUTPUT_DIR receives
    checkpoints, metrics.csv, labels.txt, predictions.txt, and model/, which transformers opens.
    labels.txt has the tags by number; predictions.txt has each word, its tag and the predicted tag.
    Where PREDICT_FILE has tags, OUTPUT_DIR also receives eval_results.json with the accuracy. For
    tags B-TYPE, I-TYPE and O it has precision, recall and F1 of exact entities too, as conlleval
    counts them. The same command continues a stopped run. Every step takes train_batch_size
    sequences, the same ones whether they are packed or not (--max_sequences_per_pack=1).
    """

    result_files = (*ScoredConfig.result_files, "labels.txt", "predictions.txt")
    scored_by = "predict_file"

    train_file: str = setting("", "CoNLL file to train on, with tags", group=DATA)
    predict_file: str = setting(
        "", "CoNLL file to tag, and to score where it has tags", changeable=True, group=PREDICTION
    )
    do_predict: bool = setting(True, "whether to tag the words of predict_file", changeable=True)
    labels_file: str = setting(
        "",
        "tags by number, one a line; empty = those of init_checkpoint where it was fine-tuned to tag, else "
        "those of train_file, sorted",
        group=DATA,
    )
    tag_loss: str = setting(
        "per_sequence",
        "per_sequence: mean over the words of each sequence, then over sequences; per_token: mean over the "
        "words of a step, as Hugging Face",
        choices=WEIGHTINGS,
        group=OPTIMIZER,
    )
    max_seq_length: int = variant(
        FinetuneConfig,
        "max_seq_length",
        128,
        help="tokens of a pack, and most of a sequence; longer sentences are cut into windows",
    )
    doc_stride: int = setting(
        64, "tokens between the starts of two windows of a sentence that is cut", minimum=1, group=DATA
    )

    def __post_init__(self):
        super().__post_init__()
        used = (("do_train", "train_file"), ("do_predict", "predict_file"))
        for task, name in used:
            if getattr(self, task) and not getattr(self, name):
                raise InputError(f"`{name}` must be given unless --{task}=false. Received: nothing.")
        check_files(self, [*(name for task, name in used if getattr(self, task)), "labels_file"])
