"""The frozen config of a pre-training run.

Names are google-research/bert's wherever it has one.
"""

import dataclasses

from bert_packed.config import (
    ATTENTIONS,
    DTYPES,
    LEAST_EPSILON,
    MODEL_SIZES,
    ablation_fields,
    check_dropout_overrides,
    parse_ablation,
)
from bert_packed.core.settings import InputError, check_divides, check_settings, setting
from bert_packed.data.batch_growth import BatchGrowth
from bert_packed.parallel.cluster import DISTRIBUTIONS
from bert_packed.runs.number_lists import mesh_shape, parse_mesh, parse_profile_steps, steps_to_profile
from bert_packed.schema import CAUSAL_LM, MLM, MLM_NSP, OBJECTIVES
from bert_packed.text.masking import MASK_REPLACE_PROB, RANDOM_REPLACE_PROB, masking_rules

MASKINGS = ("static", "dynamic")
# What `masking=dynamic` alone reads
MASKING_SETTINGS = ("vocab_file", "do_whole_word_mask", "mask_replace_prob", "random_replace_prob")
LAYOUTS = ("none", "megatron1d", "optimus2d")
SUMMA = ("gather", "ring", "tree")
WEIGHTINGS = ("per_sequence", "per_token")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Every flag of `run_pretraining.py`."""

    input_file: str = setting("", "packed training TFRecords: comma-separated paths or globs")
    eval_input_file: str = setting("", "packed held-out TFRecords; empty = no evaluation")
    output_dir: str = setting("", "where checkpoints, metrics.csv and TensorBoard events go", changeable=True)
    objective: str = setting(
        MLM_NSP,
        "what is learnt: mlm_nsp, masked tokens and next sentences, by a BERT; mlm, masked tokens alone, of "
        "records for either; causal_lm, every next token, by a Mamba",
        choices=OBJECTIVES,
    )
    bert_config_file: str = setting(
        "bert-base",
        f"size name ({', '.join(MODEL_SIZES)}) or path of a bert_config.json, or of a Mamba's config.json",
    )
    init_checkpoint: str = setting(
        "",
        "local checkpoint whose weights start this run: a folder of ours or Hugging Face's, or a TensorFlow "
        "checkpoint or SavedModel of google-research/bert; empty = random",
    )
    keep_optimizer_state: bool = setting(
        False,
        "with init_checkpoint, of an earlier run of ours: its optimizer's moments go over too; schedule, "
        "dropout and order of the data start anew",
    )
    train_batch_size: int = setting(32, "packs per optimizer step", minimum=1)
    micro_batch_size: int = setting(
        0,
        "packs computed at once; gradients of a step's micro-batches add up; 0 = train_batch_size",
        minimum=0,
    )
    initial_batch_size: int = setting(
        0,
        "packs of the first step, whole micro-batches; more follow with every step until batch_warmup_steps; "
        "0 = train_batch_size from the start",
        minimum=0,
    )
    batch_warmup_steps: int = setting(
        0, "with initial_batch_size: steps until the batch has grown to train_batch_size", minimum=0
    )
    eval_batch_size: int = setting(8, "packs per evaluation batch", minimum=1)
    num_train_steps: int = setting(100_000, "optimizer steps", minimum=1)
    num_warmup_steps: int = setting(10_000, "steps over which the learning rate rises linearly", minimum=0)
    num_decay_steps: int = setting(
        0,
        "last steps, over which the learning rate falls; 0 = all after the warm-up, fewer: warm-up, stable, "
        "decay",
        minimum=0,
    )
    optimizer: str = setting(
        "lamb", "LAMB, or adam: Adam with weight decay beside it (AdamW)", choices=("lamb", "adam")
    )
    learning_rate: float = setting(1e-3, "peak learning rate", minimum=0)
    end_learning_rate: float = setting(0.0, "learning rate after the last step", minimum=0)
    decay_power: float = setting(1.0, "power of the polynomial decay; 1 = linear", minimum=0)
    weight_decay: float = setting(0.01, "weight decay, with LAMB inside its trust ratio", minimum=0)
    beta_1: float = setting(0.9, "the optimizer's decay of momentum", minimum=0, maximum=0.999999)
    beta_2: float = setting(0.999, "the optimizer's decay of velocity", minimum=0, maximum=0.9999999)
    epsilon: float = setting(1e-6, "the optimizer's epsilon", minimum=LEAST_EPSILON)
    max_grad_norm: float = setting(1.0, "clip gradients to this global norm; 0 = never", minimum=0)
    max_skipped_steps: int = setting(
        10,
        "the run ends with so many steps in a row whose loss or gradient is not finite; each of them leaves "
        "the weights as they were",
        minimum=1,
        changeable=True,
    )
    mlm_loss: str = setting(
        "per_sequence",
        "weight of a prediction: every sequence alike, or every token alike (google-research/bert)",
        choices=WEIGHTINGS,
    )
    lm_loss: str = setting(
        "per_token",
        "as mlm_loss, for objective=causal_lm",
        choices=WEIGHTINGS,
    )
    packing_correction: str = setting(
        "none",
        "betas: beta_1 and beta_2 to the power of the data's packing factor (Efficient Sequence Packing, "
        "Section 3.3)",
        choices=("none", "betas"),
    )
    masking: str = setting(
        "static",
        "static: the masks of the records; dynamic: others in every epoch, as many of each sequence, drawn "
        "while reading (RoBERTa)",
        choices=MASKINGS,
    )
    vocab_file: str = setting(
        "",
        "with masking=dynamic: the vocabulary of the records; empty = the vocab.txt they were made with, "
        "beside them or where their manifest.json says they come from",
    )
    do_whole_word_mask: bool = setting(
        False, "with masking=dynamic: mask all pieces of a word or none, of a sequence as many as fit"
    )
    mask_replace_prob: float = setting(
        MASK_REPLACE_PROB,
        "with masking=dynamic: share of the predicted tokens that become [MASK]",
        minimum=0,
        maximum=1,
    )
    random_replace_prob: float = setting(
        RANDOM_REPLACE_PROB,
        "with masking=dynamic: share of them that become a random WordPiece; the rest stay as they are",
        minimum=0,
        maximum=1,
    )
    ablation: str = setting(
        "",
        "BREAKS PACKING, for experiments only: comma-separated no_attention_mask, no_position_reset, "
        "no_next_sentence, separator_only (all three); empty = sound packing",
        parse=parse_ablation,
    )
    dtype: str = setting(
        "float32",
        "mixed_bfloat16 computes layers in bfloat16, for accelerators; weights, softmax, layer-norm "
        "statistics and losses stay float32",
        choices=DTYPES,
    )
    attention: str = setting(
        "auto",
        "flash is the platform's fused kernel, on GPU and TPU under KERAS_BACKEND=jax and without attention "
        "dropout; auto takes it where it can",
        choices=ATTENTIONS,
    )
    distribution: str = setting(
        "none",
        "devices that share each step, a part of its packs each: none is one, mirrored all of this machine, "
        "tpu all cores of a TPU, multi_worker all of all processes that the environment variable TF_CONFIG "
        "lists (docs/training.md); a run may go on under another",
        choices=DISTRIBUTIONS,
        changeable=True,
    )
    layout: str = setting(
        "none",
        "how a model too large for one device lies on many, under KERAS_BACKEND=jax: megatron1d, matrices "
        "split in one direction; optimus2d, matrices and activations in blocks on a square of devices; none, "
        "whole on each (docs/parallelism.md); a run may go on under another",
        choices=LAYOUTS,
        changeable=True,
    )
    mesh: str = setting(
        "",
        "with layout: ROWS,COLUMNS of devices that hold one copy of the model, as 2,2, or "
        "COPIES,ROWS,COLUMNS, as 2,2,2; each copy takes a part of a step's packs",
        parse=parse_mesh,
        changeable=True,
    )
    summa: str = setting(
        "gather",
        "with layout=optimus2d, how blocks of matrices meet: gather, one collective for each matrix; ring, "
        "from neighbour to neighbour, in less memory; tree, along trees, as the paper counts",
        choices=SUMMA,
        changeable=True,
    )
    remat: bool = setting(
        False, "compute each encoder block again in the backward pass: less memory, more time"
    )
    hidden_dropout_prob: float = setting(-1.0, "overrides the model's; -1 = as the model says", maximum=0.99)
    attention_probs_dropout_prob: float = setting(
        -1.0, "overrides the model's; -1 = as the model says", maximum=0.99
    )
    random_seed: int = setting(12345, "seed of weights, dropout and data order", minimum=0, maximum=2**31 - 1)
    shuffle_buffer_size: int = setting(1000, "packs held to shuffle; 1 = the order on disk", minimum=1)
    peak_flops: float = setting(
        0.0,
        "operations a second that all devices of the run reach together, which model_flop_utilisation in the "
        "log is a share of: a vendor's figure, as 312e12; 0 = measured at the start, by a matrix product of "
        "the run's dtype",
        minimum=0,
        changeable=True,
    )
    profile_steps: str = setting(
        "",
        "FIRST,LAST as 10,20: trace these steps, first and last with them, for the profile plug-in of "
        "TensorBoard; empty = none",
        parse=parse_profile_steps,
        changeable=True,
    )
    log_steps: int = setting(10, "steps between rows of metrics.csv", minimum=1)
    eval_steps: int = setting(0, "steps between evaluations; 0 = only at the end", minimum=0)
    max_eval_steps: int = setting(0, "evaluation batches; 0 = all of the held-out data", minimum=0)
    save_checkpoints_steps: int = setting(1000, "steps between checkpoints", minimum=1, changeable=True)
    keep_checkpoint_max: int = setting(
        3,
        "newest checkpoints kept, and others until the newest has given a finite loss",
        minimum=1,
        changeable=True,
    )
    export_every: int = setting(
        0,
        "steps between exports in the form of Hugging Face, OUTPUT_DIR/export-STEP, and one after the last "
        "step; all are kept; 0 = none",
        minimum=0,
        changeable=True,
    )
    export_vocab_file: str = setting(
        "",
        "with export_every: WordPieces or, of a Mamba, a tokenizer.json, to export a tokenizer too; empty = "
        "none",
        changeable=True,
    )
    sample_data: bool = setting(
        False,
        "build the embedded sample corpus and its packed records where they are missing",
        changeable=True,
    )
    unpacked_input_file: str = setting(
        "",
        "the same data packed at depth 1; if given, the run ends with measured packed and unpacked speed",
        changeable=True,
    )
    compile_only: str = setting(
        "",
        "only compile the training step, and write its program (step.hlo.txt) and what is in it (step.json) "
        "to this folder; nothing is trained and output_dir is not needed",
        transient=True,
    )
    num_virtual_devices: int = setting(
        0,
        "with compile_only: compile for so many devices, which this machine need not have; 0 = those it has",
        minimum=0,
        transient=True,
    )
    accept_lost_rows: bool = setting(
        False,
        "continue a run although rows of its logs are lost, such as of a metrics.csv that was cut; in their "
        "place stand rows without figures",
        transient=True,
        advanced=True,
    )
    overwrite: bool = setting(False, "start anew, removing an earlier run in output_dir", transient=True)
    json: str = setting("", "also write the final tables to this file, as JSON", transient=True)

    def __post_init__(self):
        check_settings(self)
        for name in ("input_file", *([] if self.compile_only else ["output_dir"])):
            if not getattr(self, name):
                raise InputError(f"`{name}` must be given. Received: nothing.")
        if self.num_virtual_devices and not self.compile_only:
            raise InputError(
                f"`num_virtual_devices` must be 0 without compile_only. Received: {self.num_virtual_devices}."
            )
        if self.export_vocab_file and not self.export_every:
            raise InputError(
                "`export_vocab_file` must be left out without export_every. Received: "
                f"{self.export_vocab_file}."
            )
        if self.keep_optimizer_state and not self.init_checkpoint:
            raise InputError("`keep_optimizer_state` must be false without init_checkpoint. Received: True.")
        for name in ("eval_steps", "max_eval_steps"):
            value = getattr(self, name)
            if value and not self.eval_input_file:
                raise InputError(f"`{name}` must be 0 without eval_input_file. Received: {value}.")
        after_warmup = max(self.num_train_steps - self.num_warmup_steps, 0)
        if self.num_decay_steps > after_warmup:
            raise InputError(
                "`num_decay_steps` must be at most num_train_steps less num_warmup_steps, "
                f"{after_warmup}. Received: {self.num_decay_steps}."
            )
        if self.profile_steps and self.steps_to_profile[-1] > self.num_train_steps:
            raise InputError(
                f"`profile_steps` must be at most num_train_steps={self.num_train_steps}. Received: "
                f"{self.profile_steps}."
            )
        if self.objective == MLM and "ablation_no_next_sentence" in ablation_fields(self.ablation):
            raise InputError(
                f"`ablation` must leave next sentences alone for objective={MLM}, which has none. Received: "
                f"{self.ablation}."
            )
        self._check_batch_warmup()
        self._check_masking()
        self._check_layout()
        check_dropout_overrides(self)
        check_divides(self, "micro_batch_size", "train_batch_size")

    def _check_batch_warmup(self):
        initial, steps = self.initial_batch_size, self.batch_warmup_steps
        if bool(initial) != bool(steps):
            raise InputError(
                "`initial_batch_size` and `batch_warmup_steps` must be given together. Received: "
                f"initial_batch_size={initial}, batch_warmup_steps={steps}."
            )
        if initial % self.packs_at_once or initial > self.train_batch_size:
            raise InputError(
                "`initial_batch_size` must be a multiple of micro_batch_size and at most train_batch_size. "
                f"Received: {initial}, micro_batch_size={self.packs_at_once}, "
                f"train_batch_size={self.train_batch_size}."
            )

    def _check_masking(self):
        if self.masking == "dynamic":
            if self.objective == CAUSAL_LM:
                raise InputError(
                    f"`masking` must be static for objective={CAUSAL_LM}, which masks nothing. Received: "
                    "dynamic."
                )
            masking_rules(self)  # checks its shares
            return
        for field in dataclasses.fields(self):
            if field.name in MASKING_SETTINGS and getattr(self, field.name) != field.default:
                raise InputError(
                    f"`{field.name}` must be left out with masking=static, which keeps the records' masks. "
                    f"Received: {getattr(self, field.name)!r}."
                )

    def _check_layout(self):
        if (self.layout == "none") != (not self.mesh):
            raise InputError(
                f"`mesh` must be given with a layout, and only then. Received: layout={self.layout}, "
                f"mesh={self.mesh or 'nothing'}."
            )
        if self.layout == "none":
            return
        if self.distribution not in ("none", "multi_worker"):
            raise InputError(
                "`distribution` must be none, or multi_worker for devices of several processes, with a "
                "layout; the mesh says how many copies of the model share a step. Received: "
                f"{self.distribution}."
            )
        if self.objective == CAUSAL_LM:
            raise InputError(
                f"`layout` must be none for objective={self.objective}. Received: {self.layout}."
            )

    @property
    def mesh_shape(self):
        """(copies of the model, rows, columns) of the mesh; None without a layout."""
        return mesh_shape(self.mesh)

    @property
    def steps_to_profile(self):
        """Range of the steps that are traced; empty for none."""
        return steps_to_profile(self.profile_steps)

    @property
    def growth(self):
        """`BatchGrowth` of the steps; None where all are alike."""
        if not self.batch_warmup_steps:
            return None
        return BatchGrowth(
            self.initial_batch_size, self.train_batch_size, self.packs_at_once, self.batch_warmup_steps
        )

    @property
    def packs_at_once(self):
        """Packs in one micro-batch."""
        return self.micro_batch_size or self.train_batch_size
