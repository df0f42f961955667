"""Settings of learning the labels of texts or of pairs of texts."""

import dataclasses

from bert_packed.core.settings import InputError, setting, variant
from bert_packed.runs.run_config import DATA, OPTIMIZER, PREDICTION
from bert_packed.tasks.classify.labels import NUMBER, PROBLEMS, SINGLE, parse_weights
from bert_packed.tasks.config import TextFilesConfig, check_files
from bert_packed.tasks.retrieval import find_qrels

SQUARED, BINARY = "squared", "binary"


@dataclasses.dataclass(frozen=True)
class ClassifyConfig(TextFilesConfig):
    """Fine-tunes an encoder on labels of your own: a class, several labels at once, or a number.

    TRAIN_FILE and EVAL_FILE have a column text, or sentence1 and sentence2, and a column label. They are
    JSON lines, CSV, TSV, Parquet, or folders that `datasets` saved. Labels that are words or whole
    numbers are classes; fractions are numbers to predict; lists, or texts with --label_separator, are
    several labels at once. OUTPUT_DIR receives checkpoints, metrics.csv, labels.txt, eval_metrics.csv,
    predictions.tsv, eval_results.json, of classes confusion.json, and model/, which transformers opens.
    Every step takes train_batch_size sequences, the same ones whether they are packed or not. The same
    command continues a stopped run.
    """

    result_files = (
        *TextFilesConfig.result_files,
        "labels.txt",
        "predictions.tsv",
        "confusion.json",
        "ranking.tsv",
    )

    train_file: str = variant(TextFilesConfig, "train_file", "", help="texts with labels to train on")
    eval_file: str = variant(
        TextFilesConfig,
        "eval_file",
        "",
        help="texts with labels to score on; or, for numbers of pairs, a folder in BEIR's form "
        "(corpus.jsonl, queries.jsonl, qrels/*.tsv), whose documents are ranked for its queries, for nDCG@10",
    )
    candidates_file: str = setting(
        "",
        "documents to rank for each query of eval_file, a file of qrels, as a first search found them; empty "
        "= all documents",
        changeable=True,
        group=PREDICTION,
    )
    predict_file: str = setting(
        "",
        "texts to label, into predictions.tsv; empty = those of eval_file",
        changeable=True,
        group=PREDICTION,
    )
    columns: str = setting(
        "",
        "name of the column of texts, or of both, with a comma; empty = text, or sentence1,sentence2",
        group=DATA,
    )
    label_column: str = setting("label", "name of the column of labels")
    label_separator: str = setting("", 'text between several labels of a text, as ","; empty = one label')
    problem_type: str = setting(
        "auto",
        "one class, several labels at once, or a number, as transformers names them; auto = by the labels",
        choices=("auto", *PROBLEMS),
    )
    number_loss: str = setting(
        SQUARED,
        "loss of a number: squared error, or binary, the cross-entropy of labels from 0 to 1, of which the "
        "model gives the chance, as rerankers do",
        choices=(SQUARED, BINARY),
        group=OPTIMIZER,
    )
    class_weights: str = setting(
        "",
        "weights of the classes in the loss, as spam=3,news=0.5, 1 for others; or balanced, which gives all "
        "classes of train_file the same sum of weights; empty = 1 for all",
        parse=parse_weights,
        group=OPTIMIZER,
    )

    def __post_init__(self):
        super().__post_init__()
        check_files(self, ["predict_file"], or_folders=True)
        check_files(self, ["candidates_file"])
        if self.candidates_file and not (self.eval_file and find_qrels(self.eval_file)):
            raise InputError(
                "`candidates_file` must be left out without a folder in BEIR's form as eval_file. Received: "
                f"{self.candidates_file}."
            )
        if not self.do_train and not (self.eval_file or self.predict_file):
            raise InputError(
                "`eval_file` or `predict_file` must be given unless --do_train. Received: neither."
            )
        if not self.label_column:
            raise InputError("`label_column` must be a name. Received: nothing.")
        if self.label_separator and self.problem_type in (SINGLE, NUMBER):
            raise InputError(
                f"`label_separator` must be left out for {self.problem_type}. Received: "
                f"{self.label_separator!r}."
            )
        if self.number_loss == BINARY and self.problem_type not in ("auto", NUMBER):
            raise InputError(f"`number_loss` must be left out for {self.problem_type}. Received: {BINARY}.")
        if self.class_weights and self.problem_type not in ("auto", SINGLE):
            raise InputError(
                f"`class_weights` must be left out for {self.problem_type}. Received: {self.class_weights}."
            )
