"""The settings of `bert-packed train`, and its result."""

import dataclasses

from bert_packed.config import MODEL_SIZES
from bert_packed.core.settings import InputError, check_settings, result_settings, setting
from bert_packed.packing.histogram import MAX_LENGTH
from data_gen.jobs.runners import MAX_WORKERS, TEXT_WORKERS_HELP

DATA, MODEL, STEPS, CALL = "Text", "Model", "Batches and steps", "This call"
DEFAULT_EPOCHS = 3.0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings from text to a model; checks itself, raises `InputError`. Zeros are chosen by the data."""

    input_file: str = setting(
        "",
        "text files, paths or globs: one sentence a line and a blank line between documents, or JSON lines "
        "with `text`; also .gz, and tables with the extra `arrow` (docs/guides/text.md)",
        required=True,
        positional=True,
        group=DATA,
    )
    output_dir: str = setting(
        "",
        "folder for everything: instances, packs, proof, run, audit, model",
        required=True,
        changeable=True,
    )
    vocab_file: str = setting(
        "",
        "WordPieces, one a line; empty = those of init_checkpoint, or train them on the text",
    )
    vocab_size: int = setting(
        0,
        "tokens of a vocabulary trained here; 0 = 8,192, from 100 MB of text on 30,522",
        minimum=0,
        maximum=2**20,
    )
    do_lower_case: bool = setting(True, "lower-case the text and strip accents; false for cased vocabularies")
    max_seq_length: int = setting(
        512, "tokens of a pack, and most of a sequence", minimum=8, maximum=MAX_LENGTH
    )
    masked_lm_prob: float = setting(0.15, "share of the tokens to predict, other ones in every epoch")
    eval_fraction: float = setting(
        0.02, "share of the documents held out, at least one", minimum=1e-6, maximum=0.5
    )
    bert_config_file: str = setting(
        "",
        f"size name ({', '.join(MODEL_SIZES)}) or path of a bert_config.json; empty = that of "
        "init_checkpoint, or bert-base on a GPU or TPU and bert-mini on CPUs",
        group=MODEL,
    )
    init_checkpoint: str = setting("", "checkpoint to start from: as in run_pretraining.py; empty = random")
    num_train_epochs: float = setting(
        0.0,
        f"passes over the text; 0 = {DEFAULT_EPOCHS:g}, or as many as train_hours allow",
        minimum=0,
        group=STEPS,
    )
    train_hours: float = setting(
        0.0,
        "hours that the training takes, by the time of a step, which is measured first; 0 = by the epochs",
        minimum=0,
    )
    train_batch_size: int = setting(
        0, "packs per optimizer step; 0 = of 32 to 256 sequences, by the size of the text", minimum=0
    )
    learning_rate: float = setting(0.0, "peak learning rate; 0 = by the model's width", minimum=0)
    random_seed: int = setting(12345, "seed of everything", minimum=0, maximum=2**31 - 1)
    num_workers: int = setting(
        0, TEXT_WORKERS_HELP, minimum=0, maximum=MAX_WORKERS, changeable=True, group=CALL
    )
    overwrite: bool = setting(
        False, "start from the beginning, removing what an earlier call left in output_dir", transient=True
    )

    def __post_init__(self):
        check_settings(self)
        if not 0 < self.masked_lm_prob < 1:
            raise InputError(f"`masked_lm_prob` must be between 0 and 1. Received: {self.masked_lm_prob}.")
        if self.num_train_epochs and self.train_hours:
            raise InputError(
                "`num_train_epochs` must be left out with train_hours. Received: "
                f"num_train_epochs={self.num_train_epochs}, train_hours={self.train_hours}."
            )

    @property
    def identity(self):
        """The settings that a call must share with the one that it continues: dict."""
        return result_settings(self)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a call of `train` ended with."""

    output_dir: str
    model_dir: str  # in the form of Hugging Face; "" where there is none yet
    stopped_by: int = 0  # the signal after which the training saved and stopped
    failures: tuple[str, ...] = ()  # sentences: what the proof or the audit found

    @property
    def exit_status(self):
        """That of a command: 0, 1 for failures, and as shells report a process that a signal ended."""
        return 128 + self.stopped_by if self.stopped_by else int(bool(self.failures))
