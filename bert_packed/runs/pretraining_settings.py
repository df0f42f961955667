"""The settings of a pre-training run, in groups, each under one heading of `--help`.

Names are google-research/bert's wherever it has one.
"""

import dataclasses

from bert_packed.architectures.registry import MODEL_SIZES, WEIGHTINGS, parse_ablation
from bert_packed.core.settings import advanced, setting, variant
from bert_packed.parallel.targets import parse_target
from bert_packed.runs import run_config
from bert_packed.runs.run_config import DATA, LOGS, MASKING, MEMORY, MODEL, OBJECTIVE, OPTIMIZER, RUN, STEPS
from bert_packed.schema import MLM, MLM_NSP, OBJECTIVES
from bert_packed.text.masking import MASK_REPLACE_PROB, RANDOM_REPLACE_PROB

LAYOUTS = ("none", "megatron1d", "optimus2d")
MASKINGS = ("static", "dynamic")
DECAY_TYPES = ("polynomial", "1-sqrt")
MASKED = f"objective={MLM_NSP},{MLM}"
IF_DYNAMIC = {"masking=dynamic": "be left out with masking=static, which keeps the records' masks"}
WITHOUT_EPOCHS = {"num_train_epochs=0.0": "be left out with num_train_epochs"}
IF_EVALUATED = {"evaluates": "be 0 without eval_input_file or do_eval"}
EVAL_BATCHES_OF_TRAINING = 100  # at most, of the packs that are trained on; google-research/bert's default


def parse_profile_steps(text):
    """`--profile_steps`: FIRST,LAST, or nothing."""
    steps = text.split(",")
    if text and not (
        len(steps) == 2 and all(step.isdecimal() for step in steps) and 1 <= int(steps[0]) <= int(steps[1])
    ):
        raise ValueError("empty or two steps, FIRST,LAST, from 1 and in this order")
    return text


def parse_mesh(text):
    """`--mesh`: ROWS,COLUMNS or COPIES,ROWS,COLUMNS, or nothing."""
    sides = text.split(",")
    if text and not (len(sides) in (2, 3) and all(side.isdecimal() and int(side) > 0 for side in sides)):
        raise ValueError("empty, or two or three numbers of devices: ROWS,COLUMNS or COPIES,ROWS,COLUMNS")
    return text


@dataclasses.dataclass(frozen=True)
class DataSettings(run_config.DataSettings):
    """Records that a run reads, and where it writes."""

    output_dir: str = variant(
        run_config.DataSettings,
        "output_dir",
        "",
        help="where checkpoints, metrics.csv and TensorBoard events go",
    )
    input_file: str = setting(
        "", "packed training TFRecords: comma-separated paths or globs", required=True, group=DATA
    )
    eval_input_file: str = setting("", "packed held-out TFRecords; empty = no evaluation, or see do_eval")
    unpacked_input_file: str = setting(
        "",
        "the same data packed at depth 1; if given, the run ends with measured packed and unpacked speed",
        changeable=True,
    )
    vocab_file: str = setting(
        "",
        "vocabulary of the records, WordPieces or a tokenizer.json, of which output_dir gets a copy; empty = "
        "what they were made with, beside them or where their manifest.json says they come from",
        changeable=True,
    )
    sample_data: bool = setting(
        False,
        "build the embedded sample corpus and its packed records where they are missing",
        changeable=True,
    )
    max_seq_length: int = advanced(
        0, "tokens of a pack, which the records must have; 0 = as they are", changeable=True
    )
    max_predictions_per_seq: int = advanced(
        0,
        "most predictions of a sequence, which the records must be made with; 0 = as they are",
        only_with={MASKED: "be 0 for objective={objective}"},
        changeable=True,
    )
    shuffle_buffer_size: int = advanced(1000, "packs held to shuffle; 1 = the order on disk", minimum=1)


@dataclasses.dataclass(frozen=True)
class ModelSettings(run_config.ModelSettings):
    """The model, and the weights that it starts from."""

    bert_config_file: str = variant(
        run_config.ModelSettings,
        "bert_config_file",
        "bert-base",
        help=f"size name ({', '.join(MODEL_SIZES)}) or path of a bert_config.json, or of the "
        "config.json of a ModernBERT or Mamba",
    )
    init_checkpoint: str = variant(
        run_config.ModelSettings,
        "init_checkpoint",
        "",
        help="checkpoint whose weights start this run: a folder of ours or Hugging Face's, NAME or "
        "NAME@REVISION on the hub, or a TensorFlow checkpoint or SavedModel of google-research/bert; "
        "empty = random",
    )
    max_position_embeddings: int = advanced(
        0,
        "longest sequence of a ModernBERT, which may differ from that of init_checkpoint; 0 = as the model "
        "says",
        group=MODEL,
    )
    global_rope_theta: float = advanced(
        0.0,
        "base of the rotary angles of a ModernBERT's global blocks, which may differ likewise; 0 = as the "
        "model says",
    )
    keep_optimizer_state: bool = setting(
        False,
        "with init_checkpoint, of an earlier run of ours: its optimizer's moments go over too; schedule, "
        "dropout and order of the data start from the beginning",
        only_with={"init_checkpoint": "be false without init_checkpoint"},
    )
    ablation: str = advanced(
        "",
        "BREAKS PACKING, for experiments only: comma-separated no_attention_mask, no_position_reset, "
        "no_next_sentence, separator_only (all three); empty = sound packing",
        parse=parse_ablation,
    )


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """The objective, and the weights of its parts."""

    objective: str = setting(
        MLM_NSP,
        "what is learned: mlm_nsp, masked tokens and next sentences, by a BERT; mlm, masked tokens alone, of "
        "records for either; causal_lm, every next token, by a Mamba",
        choices=OBJECTIVES,
        group=OBJECTIVE,
    )
    mlm_loss: str = setting(
        "per_sequence",
        "weight of a prediction: every sequence alike, or every token alike (google-research/bert)",
        choices=WEIGHTINGS,
    )
    lm_loss: str = advanced("per_token", "as mlm_loss, for objective=causal_lm", choices=WEIGHTINGS)


@dataclasses.dataclass(frozen=True)
class MaskingSettings:
    """Masks of every epoch."""

    masking: str = setting(
        "static",
        "static: the masks of the records; dynamic: others in every epoch, as many of each sequence, drawn "
        "while reading (RoBERTa)",
        choices=MASKINGS,
        only_with={MASKED: "be static for objective={objective}, which masks nothing"},
        group=MASKING,
    )
    do_whole_word_mask: bool = setting(
        False,
        "with masking=dynamic: mask all pieces of a word or none, of a sequence as many as fit",
        only_with=IF_DYNAMIC,
    )
    mask_replace_prob: float = advanced(
        MASK_REPLACE_PROB,
        "with masking=dynamic: share of the predicted tokens that become [MASK]",
        maximum=1,
        only_with=IF_DYNAMIC,
    )
    random_replace_prob: float = advanced(
        RANDOM_REPLACE_PROB,
        "with masking=dynamic: share of them that become a random token; the rest stay as they are",
        maximum=1,
        only_with=IF_DYNAMIC,
    )


@dataclasses.dataclass(frozen=True)
class StepSettings(run_config.StepSettings):
    """Batches, and the steps of the schedule."""

    initial_batch_size: int = advanced(
        0,
        "packs of the first step, whole micro-batches; more follow with every step until batch_warmup_steps; "
        "0 = train_batch_size from the start",
        group=STEPS,
    )
    batch_warmup_steps: int = advanced(
        0, "with initial_batch_size: steps until the batch has grown to train_batch_size"
    )
    eval_batch_size: int = setting(8, "packs per evaluation batch", minimum=1)
    num_train_steps: int = setting(100_000, "optimizer steps", minimum=1, only_with=WITHOUT_EPOCHS)
    num_train_epochs: float = setting(
        0.0,
        "passes over the packs of input_file, in place of num_train_steps; the last step is a full one; 0 = "
        "num_train_steps",
    )
    num_warmup_steps: int = setting(10_000, "steps over which the learning rate rises linearly")
    num_decay_steps: int = advanced(
        0,
        "last steps, over which the learning rate falls; 0 = all after the warm-up, fewer: warm-up, stable, "
        "decay",
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(run_config.OptimizerSettings):
    """The optimizer, and the form of the decay."""

    packing_correction: str = setting(
        "none",
        "betas: beta_1 and beta_2 to the power of the data's packing factor (Efficient Sequence Packing, "
        "Section 3.3)",
        choices=("none", "betas"),
        group=OPTIMIZER,
    )
    decay_type: str = advanced(
        "polynomial",
        "form of the decay: 1-sqrt falls by the square root of the share of its steps that are done, "
        "fast at first (ModernBERT)",
        choices=DECAY_TYPES,
    )
    end_learning_rate: float = advanced(0.0, "learning rate after the last step")
    decay_power: float = advanced(
        1.0,
        "power of the polynomial decay; 1 = linear",
        only_with={"decay_type=polynomial": "be 1 with decay_type={decay_type}"},
    )


@dataclasses.dataclass(frozen=True)
class DeviceSettings(run_config.DeviceSettings):
    """Devices that share a step."""

    distribution: str = variant(
        run_config.DeviceSettings,
        "distribution",
        "none",
        only_with={"compile_for=": "be none with compile_for, whose devices all share a step"},
    )
    layout: str = setting(
        "none",
        "how a model too large for one device lies on many, under KERAS_BACKEND=jax: megatron1d, matrices "
        "split in one direction; optimus2d, matrices and activations in blocks on a square of devices; none, "
        "whole on each (docs/guides/layouts.md); a run may go on under another",
        choices=LAYOUTS,
        group=MEMORY,
        only_with={MASKED: "be none for objective={objective}"},
        changeable=True,
    )
    mesh: str = setting(
        "",
        "with layout: ROWS,COLUMNS of devices that hold one copy of the model, as 2,2, or "
        "COPIES,ROWS,COLUMNS, as 2,2,2; each copy takes a part of a step's packs",
        parse=parse_mesh,
        changeable=True,
    )
    balanced_devices: int = advanced(
        0,
        "order the packs of each step so that attention is equal work for each of this many devices, as a "
        "kernel needs that skips other sequences (docs/guides/several_devices.md); it must divide a "
        "micro-batch; 0 = as shuffled",
    )


@dataclasses.dataclass(frozen=True)
class LogSettings(run_config.LogSettings):
    """Evaluations, exports and traces during the run."""

    eval_steps: int = setting(
        0, "steps between evaluations; 0 = only at the end", only_with=IF_EVALUATED, group=LOGS
    )
    max_eval_steps: int = advanced(
        0, "evaluation batches; 0 = all of the held-out data", only_with=IF_EVALUATED
    )
    export_every: int = setting(
        0,
        "steps between exports in the form of Hugging Face, OUTPUT_DIR/export-STEP, and one after the last "
        "step; all are kept; 0 = none",
        changeable=True,
    )
    export_vocab_file: str = advanced(
        "",
        "with export_every: WordPieces or, of a Mamba, a tokenizer.json, to export a tokenizer too; empty = "
        "the copy in output_dir",
        only_with={"export_every": "be left out without export_every"},
        changeable=True,
    )
    profile_steps: str = advanced(
        "",
        "FIRST,LAST as 10,20: trace these steps, first and last with them, for the profile plug-in of "
        "TensorBoard; empty = none",
        parse=parse_profile_steps,
        changeable=True,
    )


@dataclasses.dataclass(frozen=True)
class CallSettings(run_config.CallSettings):
    """The part of a run that this call does."""

    do_train: bool = setting(
        True,
        "whether to train; false, with do_eval or eval_input_file, evaluates the newest checkpoint in "
        "output_dir, or where there is none init_checkpoint",
        changeable=True,
        group=RUN,
    )
    do_eval: bool = setting(
        False,
        "evaluate although no eval_input_file is given: packs of input_file, as google-research/bert does, "
        f"{EVAL_BATCHES_OF_TRAINING} batches unless max_eval_steps says otherwise",
        changeable=True,
    )
    compile_only: str = setting(
        "",
        "only compile the training step, and write its program (step.hlo.txt) and what is in it (step.json) "
        "to this folder; nothing is trained and output_dir is not needed",
        transient=True,
    )
    compile_for: str = setting(
        "",
        "with compile_only: devices that need not be here, KIND:SHAPE as v5e:1, v5e:4x4, v5p:2x2x1, v6e:1 or "
        "h100:4, of which several share each step and need KERAS_BACKEND=jax; pip install -e '.[aot]' "
        "(docs/reference/compiling.md); "
        "empty = those of this machine",
        parse=parse_target,
        only_with="compile_only",
        transient=True,
    )
    largest_micro_batch: bool = advanced(
        False,
        "with compile_for: find the largest micro_batch_size that fits the memory of these devices, to about "
        "a sixteenth; train_batch_size is rounded up to whole micro-batches",
        only_with="compile_for",
        transient=True,
    )
    num_virtual_devices: int = advanced(
        0,
        "with compile_only: compile for this many CPU devices; this machine need not have them; 0 = those it "
        "has",
        only_with={"compile_only": "be 0 without compile_only", "compile_for=": "be 0 with compile_for"},
        transient=True,
    )
