"""The frozen configs of fine-tuning runs, shared settings, SQuAD's, GLUE's and tagging's, and their result.

Names are google-research/bert's (run_squad.py, run_classifier.py) wherever it has one.
"""

import dataclasses

from bert_packed.architectures.registry import ENCODER_SIZES, WEIGHTINGS
from bert_packed.assembly.update_packs import check_depth
from bert_packed.core.settings import InputError, check_depth_fits, parse_depth, setting, variant
from bert_packed.packing.algorithms import ALGORITHM_NAMES, DEFAULT_ALGORITHM
from bert_packed.runs.run_config import DATA, MODEL, OPTIMIZER, PREDICTION, STEPS, RunConfig
from bert_packed.tasks.glue.files import TASK_NAMES
from bert_packed.tasks.squad.files import check_files

ALL_TASKS = "all"
SAMPLE_EPOCHS, SAMPLE_RATE = 120.0, 2e-3  # a random tiny model, learning a few questions by heart


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Settings of every fine-tuning run; checks itself, raises `InputError`."""

    output_dir: str = variant(RunConfig, "output_dir", "", required=True)
    bert_config_file: str = variant(
        RunConfig,
        "bert_config_file",
        "",
        help=f"size name ({', '.join(ENCODER_SIZES)}) or path of a bert_config.json; empty = as stored with "
        "init_checkpoint",
    )
    vocab_file: str = setting(
        "",
        "WordPieces, one a line, or a ModernBERT's tokenizer.json of byte-level BPE; empty = vocab.txt or "
        "tokenizer.json in init_checkpoint, or beside a checkpoint-N or prefix",
        group=DATA,
    )
    do_lower_case: bool = setting(
        True,
        "WordPieces: lower-case the text and strip accents; false for cased vocabularies",
    )
    do_train: bool = setting(
        True, "whether to train; false takes init_checkpoint as it is", changeable=True, group=MODEL
    )
    max_seq_length: int = setting(384, "tokens of a pack, and most of a sequence", minimum=8, group=STEPS)
    max_sequences_per_pack: int | str = setting(
        "max", "most sequences in a pack; 1 = unpacked, or the word max", parse=parse_depth
    )
    packing_algorithm: str = setting(DEFAULT_ALGORITHM, "how to pack", choices=ALGORITHM_NAMES, advanced=True)
    train_batch_size: int = variant(
        RunConfig,
        "train_batch_size",
        32,
        help="sequences, as in google-research/bert, in an optimizer step, packed or not",
    )
    predict_batch_size: int = setting(
        8, "packs computed at once in prediction", minimum=1, changeable=True, group=PREDICTION
    )
    num_train_epochs: float = setting(3.0, "passes over the training sequences", minimum=0, group=STEPS)
    warmup_proportion: float = setting(
        0.1, "share of the steps over which the learning rate rises linearly", minimum=0, maximum=1
    )
    optimizer: str = variant(RunConfig, "optimizer", "adam")
    learning_rate: float = variant(RunConfig, "learning_rate", 5e-5)
    adam_bias_correction: bool = setting(
        True,
        "correct Adam's moments for their zero start; google-research/bert does not",
        only_with="optimizer=adam",
        group=OPTIMIZER,
        advanced=True,
    )
    keep_checkpoint_max: int = variant(RunConfig, "keep_checkpoint_max", 1)

    def __post_init__(self):
        super().__post_init__()
        check_files(self, ["vocab_file"])
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)
        check_depth(self.packing_algorithm, self.max_seq_length, self.max_sequences_per_pack)
        if not self.do_train and not self.init_checkpoint:
            raise InputError("`init_checkpoint` must be given unless --do_train. Received: nothing.")

    def num_train_steps(self, num_sequences):
        """Optimizer steps of a training on a number of sequences, at least 1."""
        return max(1, int(num_sequences * self.num_train_epochs / self.train_batch_size))


@dataclasses.dataclass(frozen=True)
class SquadConfig(FinetuneConfig):
    """Every flag of `run_squad.py`."""

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
    max_query_length: int = setting(
        64, "most tokens of a question; its end is cut off", minimum=1, advanced=True
    )
    version_2_with_negative: bool = setting(False, "v2.0: questions may have no answer")
    null_score_diff_threshold: float = setting(
        0.0,
        "v2.0: predict no answer where its score is higher by more than this",
        changeable=True,
        group=PREDICTION,
        advanced=True,
    )
    n_best_size: int = setting(
        20, "answers a question in nbest_predictions.json", minimum=1, changeable=True, advanced=True
    )
    max_answer_length: int = setting(
        30, "most tokens of an answer", minimum=1, changeable=True, advanced=True
    )
    skip_bad_answers: bool = setting(
        False,
        "leave out questions whose answer is not where train_file says, and count them",
        group=DATA,
        advanced=True,
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


@dataclasses.dataclass(frozen=True)
class GlueConfig(FinetuneConfig):
    """Every flag of `python -m bert_packed.finetune_glue`."""

    task_name: str = setting(
        "",
        "the task; all = every task whose folder is in data_dir, each in its own folder of output_dir",
        choices=(*TASK_NAMES, ALL_TASKS),
        group=DATA,
    )
    data_dir: str = setting(
        "",
        "folder with the task's train.tsv and dev.tsv; for all, the folder with the tasks' folders",
        required=True,
    )
    do_eval: bool = setting(True, "whether to score dev.tsv", changeable=True, group=PREDICTION)
    do_predict: bool = setting(
        False, "whether to predict test.tsv, in the form that GLUE's server takes", changeable=True
    )
    max_seq_length: int = variant(
        FinetuneConfig,
        "max_seq_length",
        128,
        help="tokens of a pack, and most of a sequence; longer ones are cut",
    )

    def __post_init__(self):
        if not self.task_name:
            raise InputError(
                f"`task_name` must be one of {', '.join((*TASK_NAMES, ALL_TASKS))}. Received: nothing."
            )
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class NerConfig(FinetuneConfig):
    """Every flag of `python -m bert_packed.finetune_ner`."""

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


@dataclasses.dataclass(frozen=True)
class FinetuningResult:
    """What a call of `finetune` ended with."""

    output_dir: str
    scores: dict  # from name to float; {} where there is nothing to score against
    stopped_by: int = 0  # the signal after which the run saved and stopped; 0 = it is complete

    @property
    def exit_status(self):
        """That of a command, as shells report a process that a signal ended: int."""
        return 128 + self.stopped_by if self.stopped_by else 0
