"""Settings of training vectors."""

import dataclasses

from bert_packed.checkpoints.sentence_transformers import POOLINGS
from bert_packed.core.settings import InputError, setting, variant
from bert_packed.runs.run_config import DATA, OPTIMIZER
from bert_packed.tasks.config import FinetuneConfig, TextFilesConfig

LOSSES = ("auto", "ranking", "cosent")


def parse_widths(text):
    """`--matryoshka_widths`: comma-separated numbers of dimensions, or nothing."""
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("empty or comma-separated numbers of dimensions, as 384,128")
    return text


@dataclasses.dataclass(frozen=True)
class EmbedConfig(TextFilesConfig):
    """Trains an encoder whose vectors compare texts: for search, duplicates, clusters.

    TRAIN_FILE has columns anchor and positive, and may have negative, negative_2 and so on; or
    sentence1, sentence2 and score; or text alone, where each text is its own positive under other
    dropout. It is JSON lines, CSV, TSV, Parquet, or a folder that `datasets` saved. OUTPUT_DIR receives
    checkpoints, metrics.csv, eval_metrics.csv and model/, which
    sentence_transformers.SentenceTransformer and bert_packed.load_encoder open. Every step takes
    train_batch_size rows, the same ones whether they are packed or not, and each anchor is compared
    with all texts of its step. The same command continues a stopped run.
    """

    batch_unit = "row"

    eval_file: str = variant(
        TextFilesConfig,
        "eval_file",
        "",
        help="pairs with scores, for Spearman's correlation, or a folder in BEIR's form (corpus.jsonl, "
        "queries.jsonl, qrels/*.tsv), for nDCG@10, MRR@10 and recall; its dev.tsv goes before its test.tsv, "
        "unless a file of qrels is named",
    )
    columns: str = setting(
        "", "names of train_file's columns of texts, with commas; empty = by their names", group=DATA
    )
    score_column: str = setting("", "name of train_file's column of scores; empty = score beside sentence1")
    query_prefix: str = setting("", 'text before each anchor, as "query: "; empty = that of init_checkpoint')
    passage_prefix: str = setting("", "text before every other text; empty = that of init_checkpoint")
    pooling: str = setting(
        "auto",
        "the vector of a text: the mean over its tokens, or that of [CLS]; auto = as a folder of "
        "sentence-transformers in init_checkpoint says, else mean",
        choices=("auto", *POOLINGS),
    )
    normalize: bool = setting(True, "whether vectors have length 1, so that products are cosines")
    loss: str = setting(
        "auto",
        "ranking: each anchor must find its positive among all texts of the step; cosent: pairs must be as "
        "similar as the order of their scores says; auto = cosent where there are scores",
        choices=LOSSES,
        group=OPTIMIZER,
    )
    temperature: float = setting(0.05, "divisor of similarities in the loss", minimum=1e-4)
    both_directions: bool = setting(False, "ranking: whether a positive must find its anchor, too")
    matryoshka_widths: str = setting(
        "",
        "numbers of first dimensions, with commas, each of which must compare by itself; the loss is the sum "
        "of theirs and that of all dimensions, which is always there",
        parse=parse_widths,
    )
    max_seq_length: int = variant(
        FinetuneConfig,
        "max_seq_length",
        128,
        help="tokens of a pack, and most of a text; longer ones are cut",
    )
    train_batch_size: int = variant(
        FinetuneConfig, "train_batch_size", 64, help="rows of train_file in an optimizer step, packed or not"
    )
    num_train_epochs: float = variant(FinetuneConfig, "num_train_epochs", 1.0)

    def __post_init__(self):
        super().__post_init__()
        if self.both_directions and self.loss == "cosent":
            raise InputError("`both_directions` must be false for loss=cosent. Received: True.")

    @property
    def widths(self):
        """`matryoshka_widths` as numbers, the widest first: tuple."""
        parts = self.matryoshka_widths.split(",") if self.matryoshka_widths else []
        return tuple(sorted(map(int, parts), reverse=True))
