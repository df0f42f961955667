"""The settings of `bert-packed train`, and its result."""

import dataclasses
import os

from bert_packed.architectures.registry import ENCODER_SIZES, MODEL_SIZES
from bert_packed.core.hub import name_of
from bert_packed.core.settings import InputError, check_settings, result_settings, setting, variant
from bert_packed.core.storage import check_local
from bert_packed.packing.histogram import MAX_LENGTH
from bert_packed.runs.run_config import DeviceSettings
from data_gen.jobs.runners import MAX_WORKERS, TEXT_WORKERS_HELP

DATA, MODEL, STEPS, DEVICES = "Text", "Model", "Batches and steps", "Devices"
CALL = "This call"
DEFAULT_EPOCHS = 3.0
LONGEST_HOURS, MOST_EPOCHS, MOST_PACKS = 10_000, 10**6, 2**20
# A vocabulary that is given is not trained
NOT_GIVEN = {f"{name}=": f"be left out with {name}" for name in ("vocab_file", "init_checkpoint")}
PATHS = ("vocab_file", "bert_config_file", "init_checkpoint")
TRAINING = (
    *("bert_config_file", "num_train_epochs", "train_hours", "train_batch_size", "learning_rate"),
    *("attention", "distribution"),
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Makes a model from text with one command. It makes a vocabulary, instances with a held-out split,
    and packs, and proves that every sequence is in them once. It trains a masked language model with
    other masks in every epoch, and audits that no sequence of a pack sees another. Then it exports the
    model for transformers and load_encoder.

    The same command continues after a kill and leaves out what is done. OUTPUT_DIR/flags has what was
    chosen, as flagfiles of the single commands; a setting changed in pretrain.flags before training
    has saved is honored.

    Exit status 1: the proof or the audit has found a fault.
    """

    input_file: str = setting(
        "",
        "text files, paths or globs: one sentence a line and a blank line between documents, or JSON lines "
        "with `text`; also .gz, tables with the extra `arrow`, and files of the hub, hf://datasets/OWNER/"
        "NAME/FILES (docs/guides/text.md)",
        required=True,
        positional=True,
        changeable=True,  # the same text may be named in other words
        group=DATA,
    )
    output_dir: str = setting(
        "",
        "folder for everything: instances, packs, proof, run, audit, model",
        required=True,
        changeable=True,
    )
    text_column: str = setting(
        "text", "name of the text in JSON lines and tables, in the place of `text` and `paragraphs`"
    )
    vocab_file: str = setting(
        "",
        "WordPieces, one a line, or for a ModernBERT a tokenizer.json of byte-level BPE; empty = that of "
        "init_checkpoint, or train it on the text: bytes for a ModernBERT, else WordPieces",
    )
    vocab_size: int = setting(
        0,
        "tokens of a vocabulary trained here; 0 = 8,192, or 30,522 for files of 100 MB and more",
        maximum=2**20,
        only_with=NOT_GIVEN,
    )
    do_lower_case: bool = setting(
        True, "lower-case the text and strip accents; false for cased vocabularies; byte-level BPE keeps case"
    )
    max_seq_length: int = setting(
        512, "tokens of a pack, and most of a sequence", minimum=8, maximum=MAX_LENGTH
    )
    masked_lm_prob: float = setting(
        0.15, "share of the tokens to predict, other ones in every epoch", minimum=None
    )
    eval_fraction: float = setting(
        0.02, "share of the documents held out, at least one; 0 = none", maximum=0.5
    )
    bert_config_file: str = setting(
        "",
        f"size name ({', '.join(ENCODER_SIZES)}) or path of a bert_config.json; empty = that of "
        "init_checkpoint, or bert-base on a GPU or TPU and bert-mini on CPUs",
        group=MODEL,
    )
    init_checkpoint: str = setting("", "checkpoint to start from: as in run_pretraining.py; empty = random")
    num_train_epochs: float = setting(
        0.0,
        f"passes over the text; 0 = {DEFAULT_EPOCHS:g}, or as many as train_hours allow",
        maximum=MOST_EPOCHS,
        group=STEPS,
    )
    train_hours: float = setting(
        0.0,
        "hours that the training takes, by the time of a step, which is measured first; 0 = by the epochs",
        maximum=LONGEST_HOURS,
    )
    train_batch_size: int = setting(
        0,
        "packs per optimizer step; 0 = of 32 to 256 sequences, by the length of the training",
        maximum=MOST_PACKS,
    )
    learning_rate: float = setting(
        0.0, "peak learning rate; 0 = 5e-5 from init_checkpoint, else by the model's width"
    )
    random_seed: int = setting(12345, "seed of everything", maximum=2**31 - 1)
    attention: str = variant(DeviceSettings, "attention", "auto", group=DEVICES)
    distribution: str = variant(
        DeviceSettings,
        "distribution",
        "none",
        help="devices that share each step of the training, a part of its packs each: none is one, mirrored "
        "all of this machine, tpu all cores of a TPU (docs/guides/several_devices.md)",
        choices=("none", "mirrored", "tpu"),
        changeable=False,
    )
    num_workers: int = setting(0, TEXT_WORKERS_HELP, maximum=MAX_WORKERS, changeable=True, group=CALL)
    overwrite: bool = setting(
        False, "start from the beginning, removing what an earlier call left in output_dir", transient=True
    )

    def __post_init__(self):
        check_settings(self)
        check_local(self.output_dir, "output_dir")
        if not 0 < self.masked_lm_prob < 1:
            raise InputError(f"`masked_lm_prob` must be between 0 and 1. Received: {self.masked_lm_prob}.")
        if self.num_train_epochs and self.train_hours:
            raise InputError(
                "`num_train_epochs` must be left out with train_hours. Received: "
                f"num_train_epochs={self.num_train_epochs}, train_hours={self.train_hours}."
            )

    @property
    def splits(self):
        """Names of the splits of the text."""
        return ("train", "eval") if self.eval_fraction else ("train",)

    def recorded(self):
        """Settings that the result depends on, with whole paths: dict of `data` and `training`."""
        settings = result_settings(self)
        if self.text_column == "text":  # older calls had no other
            del settings["text_column"]
        for name in PATHS:
            if settings[name] and settings[name] not in MODEL_SIZES:
                settings[name] = name_of(os.path.abspath(settings[name]))
        training = {name: settings.pop(name) for name in TRAINING}
        return {"data": settings, "training": training}


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of a call of `train`."""

    output_dir: str
    model_dir: str  # in the form of Hugging Face; "" where there is none yet
    stopped_by: int = 0  # the signal after which the training saved and stopped
    failures: tuple[str, ...] = ()  # sentences: what the proof or the audit found

    @property
    def exit_status(self):
        """Exit status of a command: 0, 1 for failures, and as shells report a process ended by a signal."""
        return 128 + self.stopped_by if self.stopped_by else int(bool(self.failures))
