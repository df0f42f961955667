"""Settings of fine-tuning on SQuAD; names are those of google-research/bert's run_squad.py."""

import dataclasses

from bert_packed.core.settings import InputError, advanced, setting, variant
from bert_packed.runs.run_config import DATA, PREDICTION
from bert_packed.tasks.config import FinetuneConfig, check_files

SAMPLE_EPOCHS, SAMPLE_RATE = 120.0, 2e-3  # a random tiny model, learning a few questions by heart


@dataclasses.dataclass(frozen=True)
class SquadConfig(FinetuneConfig):
    """Fine-tunes a packed BERT to find answers in texts, and answers questions: SQuAD v1.1 and v2.0.

    OUTPUT_DIR receives checkpoints, metrics.csv, predictions.json and nbest_predictions.json. It also
    receives null_odds.json for v2.0, and eval_results.json where PREDICT_FILE has the right answers.
    The same command continues a stopped run. Every step takes train_batch_size sequences, the same
    ones whether they are packed or not (--max_sequences_per_pack=1).

    Without train_file and predict_file it memorizes a few questions about this project:
    --flagfile=squad.flags takes about two minutes on two cores.
    """

    result_files = ("predictions.json", "nbest_predictions.json", "null_odds.json")

    train_file: str = setting(
        "", "SQuAD JSON to train on; without it and predict_file, the project's own few questions", group=DATA
    )
    predict_file: str = setting(
        "", "SQuAD JSON to answer, and to score where it has answers", changeable=True, group=PREDICTION
    )
    do_predict: bool = setting(True, "whether to answer the questions of predict_file", changeable=True)
    learning_rate: float = variant(
        FinetuneConfig,
        "learning_rate",
        0.0,
        help=f"peak learning rate; 0 = 5e-5, on the project's own questions from random {SAMPLE_RATE:g}",
    )
    num_train_epochs: float = variant(
        FinetuneConfig,
        "num_train_epochs",
        0.0,
        help=f"passes over the training sequences; 0 = 2, on the project's own questions {SAMPLE_EPOCHS:g}",
    )
    doc_stride: int = setting(
        128, "tokens between the starts of two windows of a context", minimum=1, group=DATA
    )
    max_query_length: int = advanced(64, "most tokens of a question; its end is cut off", minimum=1)
    version_2_with_negative: bool = setting(False, "v2.0: questions may have no answer")
    null_score_diff_threshold: float = advanced(
        0.0,
        "v2.0: predict no answer where its score is higher by more than this",
        minimum=None,
        changeable=True,
        group=PREDICTION,
    )
    n_best_size: int = advanced(
        20, "answers a question in nbest_predictions.json", minimum=1, changeable=True
    )
    max_answer_length: int = advanced(30, "most tokens of an answer", minimum=1, changeable=True)
    skip_bad_answers: bool = advanced(
        False, "leave out questions whose answer is not where train_file says, and count them", group=DATA
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_seq_length < self.max_query_length + 4:
            raise InputError(
                "`max_seq_length` must be at least max_query_length + 4. Received: "
                f"max_seq_length={self.max_seq_length}, max_query_length={self.max_query_length}."
            )
        used = (("do_train", "train_file"), ("do_predict", "predict_file"))
        check_files(self, [name for task, name in used if getattr(self, task)])
        if self.is_sample:
            return
        for task, name in used:
            if getattr(self, task) and not getattr(self, name):
                raise InputError(f"`{name}` must be given unless --{task}=false. Received: nothing.")

    @property
    def is_sample(self):
        """True if the project's own questions are used."""
        return not self.train_file and not self.predict_file

    def resolved(self):
        """The config with its zeros replaced by the defaults that they select."""
        rate = SAMPLE_RATE if self.is_sample and not self.init_checkpoint else 5e-5
        epochs = SAMPLE_EPOCHS if self.is_sample else 2.0
        return dataclasses.replace(
            self,
            learning_rate=self.learning_rate or rate,
            num_train_epochs=self.num_train_epochs or epochs,
        )
