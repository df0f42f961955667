"""The frozen configs of fine-tuning runs: what all share, SQuAD's, GLUE's and tagging's own.

Names are google-research/bert's (run_squad.py, run_classifier.py) wherever it has one.
"""

import dataclasses

from bert_packed.config import DTYPES, LEAST_EPSILON, MODEL_SIZES, check_dropout_overrides
from bert_packed.core.settings import InputError, check_depth_fits, check_settings, parse_depth, setting
from bert_packed.packing.algorithms import ALGORITHM_NAMES, DEFAULT_ALGORITHM
from bert_packed.tasks.glue import TASK_NAMES
from bert_packed.tasks.squad import check_files
from bert_packed.tasks.update_packs import check_depth

ALL_TASKS = "all"
SAMPLE_EPOCHS, SAMPLE_RATE = 120.0, 2e-3  # a random tiny model, learning a few questions by heart


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """What every fine-tuning can be told; checks itself, raises `InputError`."""

    output_dir: str = setting("", "where checkpoints, metrics.csv and results go", changeable=True)
    init_checkpoint: str = setting(
        "",
        "local checkpoint to start from: a folder of ours or Hugging Face's, or a TensorFlow checkpoint of "
        "google-research/bert; empty = random",
    )
    bert_config_file: str = setting(
        "",
        f"size name ({', '.join(MODEL_SIZES)}) or path of a bert_config.json; empty = as stored with "
        "init_checkpoint",
    )
    vocab_file: str = setting(
        "", "WordPieces, one a line; empty = vocab.txt in init_checkpoint, or beside a checkpoint-N or prefix"
    )
    do_lower_case: bool = setting(True, "lower-case the text and strip accents; false for cased vocabularies")
    do_train: bool = setting(True, "whether to train; false takes init_checkpoint as it is", changeable=True)
    max_seq_length: int = setting(384, "tokens of a pack, and most of a sequence", minimum=8)
    train_batch_size: int = setting(32, "sequences per optimizer step, packed or not", minimum=1)
    micro_batch_size: int = setting(
        1, "packs computed at once in training; gradients of a step's micro-batches add up", minimum=1
    )
    predict_batch_size: int = setting(8, "packs computed at once in prediction", minimum=1, changeable=True)
    max_sequences_per_pack: int | str = setting(
        "max", "most sequences in a pack; 1 = unpacked, or the word max", parse=parse_depth
    )
    packing_algorithm: str = setting(DEFAULT_ALGORITHM, "how to pack", choices=ALGORITHM_NAMES)
    learning_rate: float = setting(5e-5, "peak learning rate", minimum=0)
    num_train_epochs: float = setting(3.0, "passes over the training sequences", minimum=0)
    warmup_proportion: float = setting(
        0.1, "share of the steps over which the learning rate rises linearly", minimum=0, maximum=1
    )
    optimizer: str = setting("adam", "Adam with weight decay, or LAMB", choices=("adam", "lamb"))
    adam_bias_correction: bool = setting(
        True, "correct Adam's moments for their zero start; google-research/bert does not"
    )
    weight_decay: float = setting(0.01, "weight decay; none on biases and layer norms", minimum=0)
    beta_1: float = setting(0.9, "decay of momentum", minimum=0, maximum=0.999999)
    beta_2: float = setting(0.999, "decay of velocity", minimum=0, maximum=0.9999999)
    epsilon: float = setting(1e-6, "the optimizer's epsilon", minimum=LEAST_EPSILON)
    max_grad_norm: float = setting(1.0, "clip gradients to this global norm; 0 = never", minimum=0)
    dtype: str = setting(
        "float32", "mixed_bfloat16 computes layers in bfloat16, for accelerators", choices=DTYPES
    )
    remat: bool = setting(
        False, "compute each encoder block again in the backward pass: less memory, more time"
    )
    hidden_dropout_prob: float = setting(-1.0, "overrides the model's; -1 = as the model says", maximum=0.99)
    attention_probs_dropout_prob: float = setting(
        -1.0, "overrides the model's; -1 = as the model says", maximum=0.99
    )
    random_seed: int = setting(
        12345, "seed of the head, dropout and data order", minimum=0, maximum=2**31 - 1
    )
    max_skipped_steps: int = setting(
        10,
        "the run ends with so many steps in a row whose loss or gradient is not finite; each of them leaves "
        "the weights as they were",
        minimum=1,
        changeable=True,
    )
    log_steps: int = setting(10, "steps between rows of metrics.csv", minimum=1)
    save_checkpoints_steps: int = setting(1000, "steps between checkpoints", minimum=1, changeable=True)
    keep_checkpoint_max: int = setting(
        1,
        "newest checkpoints kept, and others until the newest has given a finite loss",
        minimum=1,
        changeable=True,
    )
    accept_lost_rows: bool = setting(
        False,
        "continue a run although rows of its logs are lost, such as of a metrics.csv that was cut; in their "
        "place stand rows without figures",
        transient=True,
        advanced=True,
    )
    overwrite: bool = setting(False, "start anew, removing an earlier run in output_dir", transient=True)
    json: str = setting("", "also write the final scores to this file, as JSON", transient=True)

    def __post_init__(self):
        check_settings(self)
        if not self.output_dir:
            raise InputError("`output_dir` must be given. Received: nothing.")
        check_dropout_overrides(self)
        check_files(self, ["vocab_file"])
        check_depth_fits(self.max_sequences_per_pack, self.max_seq_length)
        check_depth(self.packing_algorithm, self.max_seq_length, self.max_sequences_per_pack)
        if not self.do_train and not self.init_checkpoint:
            raise InputError("`init_checkpoint` must be given unless --do_train. Received: nothing.")

    def num_train_steps(self, num_sequences):
        """Optimizer steps of a training on so many sequences, at least 1."""
        return max(1, int(num_sequences * self.num_train_epochs / self.train_batch_size))


@dataclasses.dataclass(frozen=True)
class SquadConfig(FinetuneConfig):
    """Every flag of `run_squad.py`."""

    train_file: str = setting(
        "", "SQuAD JSON to train on; without it and predict_file, the project's own few questions"
    )
    predict_file: str = setting(
        "", "SQuAD JSON to answer, and to score where it has answers", changeable=True
    )
    do_predict: bool = setting(True, "whether to answer the questions of predict_file", changeable=True)
    learning_rate: float = setting(
        0.0,
        f"peak learning rate; 0 = 5e-5, on the project's own questions from random {SAMPLE_RATE:g}",
        minimum=0,
    )
    num_train_epochs: float = setting(
        0.0,
        f"passes over the training sequences; 0 = 2, on the project's own questions {SAMPLE_EPOCHS:g}",
        minimum=0,
    )
    doc_stride: int = setting(128, "tokens between the starts of two windows of a context", minimum=1)
    max_query_length: int = setting(64, "most tokens of a question; its end is cut off", minimum=1)
    version_2_with_negative: bool = setting(False, "v2.0: questions may have no answer")
    null_score_diff_threshold: float = setting(
        0.0, "v2.0: predict no answer where its score is higher by more than this", changeable=True
    )
    n_best_size: int = setting(20, "answers a question in nbest_predictions.json", minimum=1, changeable=True)
    max_answer_length: int = setting(30, "most tokens of an answer", minimum=1, changeable=True)
    skip_bad_answers: bool = setting(
        False, "leave out questions whose answer is not where train_file says, and count them"
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
        """Whether the project's own questions are used."""
        return not self.train_file and not self.predict_file

    def resolved(self):
        """The config with the values that its zeros stand for."""
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
    )
    data_dir: str = setting(
        "", "folder with the task's train.tsv and dev.tsv; for all, the folder with the tasks' folders"
    )
    do_eval: bool = setting(True, "whether to score dev.tsv", changeable=True)
    do_predict: bool = setting(
        False, "whether to predict test.tsv, in the form that GLUE's server takes", changeable=True
    )
    max_seq_length: int = setting(
        128, "tokens of a pack, and most of a sequence; longer ones are cut", minimum=8
    )

    def __post_init__(self):
        if not self.task_name:
            raise InputError(
                f"`task_name` must be one of {', '.join((*TASK_NAMES, ALL_TASKS))}. Received: nothing."
            )
        super().__post_init__()
        if not self.data_dir:
            raise InputError("`data_dir` must be given. Received: nothing.")


@dataclasses.dataclass(frozen=True)
class NerConfig(FinetuneConfig):
    """Every flag of `python -m bert_packed.finetune_ner`."""

    train_file: str = setting("", "CoNLL file to train on, with tags")
    predict_file: str = setting("", "CoNLL file to tag, and to score where it has tags", changeable=True)
    do_predict: bool = setting(True, "whether to tag the words of predict_file", changeable=True)
    labels_file: str = setting(
        "",
        "tags by number, one a line; empty = those of init_checkpoint where it was fine-tuned to tag, else "
        "those of train_file, sorted",
    )
    tag_loss: str = setting(
        "per_sequence",
        "per_sequence: mean over the words of each sequence, then over sequences; per_token: mean over the "
        "words of a step, as Hugging Face",
        choices=("per_sequence", "per_token"),
    )
    max_seq_length: int = setting(
        128, "tokens of a pack, and most of a sequence; longer sentences are cut into windows", minimum=8
    )
    doc_stride: int = setting(
        64, "tokens between the starts of two windows of a sentence that is cut", minimum=1
    )

    def __post_init__(self):
        super().__post_init__()
        used = (("do_train", "train_file"), ("do_predict", "predict_file"))
        for task, name in used:
            if getattr(self, task) and not getattr(self, name):
                raise InputError(f"`{name}` must be given unless --{task}=false. Received: nothing.")
        check_files(self, [*(name for task, name in used if getattr(self, task)), "labels_file"])
