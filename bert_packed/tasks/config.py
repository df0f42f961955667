"""Settings that all fine-tuning tasks share, and the result of a run.

Names are google-research/bert's (run_squad.py, run_classifier.py) wherever it has one.
"""

import dataclasses

from bert_packed.architectures.registry import ENCODER_SIZES
from bert_packed.assembly.update_packs import check_depth
from bert_packed.core import storage
from bert_packed.core.settings import InputError, advanced, check_depth_fits, parse_depth, setting, variant
from bert_packed.packing.algorithms import ALGORITHM_NAMES, DEFAULT_ALGORITHM
from bert_packed.runs.run_config import DATA, LOGS, MODEL, OPTIMIZER, PREDICTION, STEPS, RunConfig


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Settings of every fine-tuning run; checks itself, raises `InputError`."""

    batch_unit = "sequence"  # what `train_batch_size` counts

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
        True, "WordPieces: lower-case the text and strip accents; false for cased vocabularies"
    )
    do_train: bool = setting(
        True, "whether to train; false takes init_checkpoint as it is", changeable=True, group=MODEL
    )
    max_seq_length: int = setting(384, "tokens of a pack, and most of a sequence", minimum=8, group=STEPS)
    max_sequences_per_pack: int | str = setting(
        "max", "most sequences in a pack; 1 = unpacked, or the word max", parse=parse_depth
    )
    packing_algorithm: str = advanced(DEFAULT_ALGORITHM, "how to pack", choices=ALGORITHM_NAMES)
    train_batch_size: int = variant(
        RunConfig,
        "train_batch_size",
        32,
        help="sequences, as in google-research/bert, in an optimizer step, packed or not",
    )
    predict_batch_size: int = setting(
        8, "packs computed at once in prediction", minimum=1, changeable=True, group=PREDICTION
    )
    num_train_epochs: float = setting(3.0, "passes over the training sequences", group=STEPS)
    warmup_proportion: float = setting(
        0.1, "share of the steps over which the learning rate rises linearly", maximum=1
    )
    optimizer: str = variant(RunConfig, "optimizer", "adam")
    learning_rate: float = variant(RunConfig, "learning_rate", 5e-5)
    adam_bias_correction: bool = advanced(
        True,
        "correct Adam's moments for their zero start; google-research/bert does not",
        only_with="optimizer=adam",
        group=OPTIMIZER,
    )
    keep_checkpoint_max: int = variant(RunConfig, "keep_checkpoint_max", 1)

    def __post_init__(self):
        super().__post_init__()
        check_files(self, ["vocab_file"])
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)
        check_depth(self.packing_algorithm, self.max_seq_length, self.max_sequences_per_pack)
        if not self.do_train and not self.init_checkpoint:
            raise InputError("`init_checkpoint` must be given unless --do_train. Received: nothing.")

    def check_inputs(self):
        """Raise `InputError` for an input that is not there, before Keras is imported."""

    def first_run(self):
        """The config of the run that says how this one began."""
        return self

    def num_train_steps(self, num_sequences):
        """Optimizer steps of a training on a number of sequences, at least 1."""
        return max(1, int(num_sequences * self.num_train_epochs / self.train_batch_size))


@dataclasses.dataclass(frozen=True)
class ScoredConfig(FinetuneConfig):
    """Settings of runs that are scored while they train, and leave their model as others open it."""

    result_files = ("model", "best")
    scored_by = "eval_file"  # the flag that says what is scored

    max_seq_length: int = variant(
        FinetuneConfig,
        "max_seq_length",
        128,
        help="tokens of a pack, and most of a sequence; longer ones are cut",
    )
    eval_steps: int = setting(0, "steps between evaluations; 0 = at the end alone", group=LOGS)
    keep_best: bool = setting(
        False,
        "whether model/ is that of the evaluation with the best score, the start's included, not the last",
    )
    early_stopping_patience: int = setting(
        0, "evaluations without a better score after which the run ends; 0 = it never ends early"
    )
    best_score: str = setting("", "name of the score that decides which is better; empty = the first")

    def __post_init__(self):
        super().__post_init__()
        for name in ("keep_best", "eval_steps", "best_score", "early_stopping_patience"):
            value = getattr(self, name)
            if value and not self.do_train:
                raise InputError(f"`{name}` must be left out unless --do_train. Received: {value}.")
            if value and not getattr(self, self.scored_by) and name != "early_stopping_patience":
                raise InputError(f"`{name}` must be left out without {self.scored_by}. Received: {value}.")
        if self.early_stopping_patience and not self.eval_steps:
            raise InputError(
                f"`early_stopping_patience` must be 0 without eval_steps. "
                f"Received: {self.early_stopping_patience}."
            )


@dataclasses.dataclass(frozen=True)
class TextFilesConfig(ScoredConfig):
    """Settings of scored runs whose texts are in files of rows."""

    train_file: str = setting("", "texts to train on", group=DATA)
    eval_file: str = setting("", "texts to score on", changeable=True, group=PREDICTION)

    def __post_init__(self):
        super().__post_init__()
        if self.do_train and not self.train_file:
            raise InputError("`train_file` must be given unless --do_train=false. Received: nothing.")
        check_files(self, ["train_file", "eval_file"], or_folders=True)


@dataclasses.dataclass(frozen=True)
class LoopSteps:
    """The outer loop's part of a config."""

    num_train_steps: int
    log_steps: int
    save_checkpoints_steps: int
    max_skipped_steps: int
    eval_steps: int = 0


@dataclasses.dataclass(frozen=True)
class FinetuningResult:
    """Result of a call of `finetune`."""

    output_dir: str
    scores: dict  # from name to float; {} where there is nothing to score against
    stopped_by: int = 0  # the signal after which the run saved and stopped; 0 = it is complete

    @property
    def exit_status(self):
        """Exit status of a command, as shells report a process that a signal ended: int."""
        return 128 + self.stopped_by if self.stopped_by else 0


def check_files(config, names, or_folders=False):
    """Raise `InputError` for the first flag whose file is missing or, unless `or_folders`, a folder.

    Empty flags pass.
    """
    is_there, kind = (storage.exists, "file or folder") if or_folders else (storage.is_file, "file")
    for name in names:
        path = getattr(config, name)
        if path and not is_there(path):
            raise InputError(f"`{name}` must be an existing {kind}. Received: {path}.")
