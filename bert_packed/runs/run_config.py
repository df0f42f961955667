"""Settings that pre-training and fine-tuning share."""

import dataclasses

from bert_packed.architectures.base_config import DROPOUT_FIELDS
from bert_packed.architectures.registry import ATTENTIONS, AUTO, DTYPES, LEAST_EPSILON, MODEL_SIZES
from bert_packed.core.settings import InputError, advanced, check_settings, setting
from bert_packed.parallel.cluster import DISTRIBUTIONS

# Headings in `--help`
HEADINGS = DATA, MODEL, OBJECTIVE, MASKING, STEPS, OPTIMIZER, PREDICTION, MEMORY, LOGS, RUN = (
    "Data",
    "Model",
    "Losses",
    "Masking",
    "Batches and steps",
    "Optimizer",
    "Prediction",
    "Devices and memory",
    "Logs and checkpoints",
    "This call",
)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The output directory."""

    output_dir: str = setting(
        "", "where checkpoints, metrics.csv and results go", changeable=True, group=DATA
    )


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model, and the weights that it starts from."""

    bert_config_file: str = setting(
        "", f"size name ({', '.join(MODEL_SIZES)}) or path of a bert_config.json", group=MODEL
    )
    init_checkpoint: str = setting(
        "",
        "checkpoint to start from: a folder of ours or Hugging Face's, NAME or NAME@REVISION on the hub, or "
        "a TensorFlow checkpoint of google-research/bert; empty = random",
    )
    hidden_dropout_prob: float = advanced(
        -1.0, "overrides the model's; -1 = as the model says", minimum=None, maximum=0.99
    )
    attention_probs_dropout_prob: float = advanced(
        -1.0, "overrides the model's; -1 = as the model says", minimum=None, maximum=0.99
    )


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Batches, and their order."""

    train_batch_size: int = setting(
        32, "packs, each of several sequences, in an optimizer step", minimum=1, group=STEPS
    )
    micro_batch_size: int = setting(
        0,
        "packs computed at once, in training; gradients of a step's micro-batches add up; 0 = all of a step, "
        "or as the run that continues began",
    )
    random_seed: int = setting(12345, "seed of weights, dropout and data order", maximum=2**31 - 1)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer."""

    optimizer: str = setting(
        "lamb",
        "LAMB, or adam: Adam with weight decay beside it (AdamW), or stable_adamw: AdamW with smaller steps "
        "where a gradient outgrows its second moment (ModernBERT)",
        choices=("lamb", "adam", "stable_adamw"),
        group=OPTIMIZER,
    )
    learning_rate: float = setting(1e-3, "peak learning rate")
    weight_decay: float = setting(
        0.01, "weight decay, with LAMB inside its trust ratio; none on biases and norms"
    )
    beta_1: float = advanced(0.9, "the optimizer's decay of momentum", maximum=0.999999)
    beta_2: float = advanced(0.999, "the optimizer's decay of velocity", maximum=0.9999999)
    epsilon: float = advanced(1e-6, "the optimizer's epsilon", minimum=LEAST_EPSILON)
    max_grad_norm: float = setting(1.0, "clip gradients to this global norm; 0 = never")
    max_skipped_steps: int = advanced(
        10,
        "the run ends after this many steps in a row whose loss or gradient is not finite; each of them "
        "leaves the weights as they were",
        minimum=1,
        changeable=True,
    )


@dataclasses.dataclass(frozen=True)
class DeviceSettings:
    """Precision, memory, kernels, and devices that share a step."""

    dtype: str = setting(
        AUTO,
        "mixed_bfloat16 computes layers in bfloat16, for accelerators; weights, softmax, layer-norm "
        "statistics and losses stay float32; float32 is float32 there, too, and slower; auto is "
        "mixed_bfloat16 on GPU and TPU and float32 elsewhere, and a run that continues keeps its own",
        choices=(AUTO, *DTYPES),
        group=MEMORY,
    )
    remat: bool = setting(
        False, "compute each encoder block again in the backward pass: less memory, more time"
    )
    attention: str = setting(
        "auto",
        "flash is the platform's fused kernel, on GPU and TPU under KERAS_BACKEND=jax; auto takes it there, "
        "and for a Mamba those of its convolution and scan",
        choices=ATTENTIONS,
    )
    distribution: str = setting(
        "none",
        "devices that share each step, a part of its packs each: none is one, mirrored all of this machine, "
        "tpu all cores of a TPU, multi_worker all of all processes that the environment variable TF_CONFIG "
        "lists (docs/guides/several_devices.md); a run may go on under another",
        choices=DISTRIBUTIONS,
        changeable=True,
    )


@dataclasses.dataclass(frozen=True)
class LogSettings:
    """Logs and checkpoints."""

    log_steps: int = setting(10, "steps between rows of metrics.csv", minimum=1, group=LOGS)
    save_checkpoints_steps: int = setting(1000, "steps between checkpoints", minimum=1, changeable=True)
    keep_checkpoint_max: int = setting(
        3,
        "newest checkpoints kept, and others until the newest has given a finite loss",
        minimum=1,
        changeable=True,
    )


@dataclasses.dataclass(frozen=True)
class CallSettings:
    """Settings of this call alone."""

    overwrite: bool = setting(
        False, "start from the beginning, removing an earlier run in output_dir", transient=True, group=RUN
    )
    accept_lost_rows: bool = advanced(
        False,
        "continue a run although rows of its logs are lost, for example where metrics.csv was cut; rows "
        "without figures take their place",
        transient=True,
    )
    json: str = setting("", "also write the final figures to this file, as JSON", transient=True)


@dataclasses.dataclass(frozen=True)
class RunConfig(
    # Flags have the order of these groups, from right to left
    CallSettings,
    LogSettings,
    DeviceSettings,
    OptimizerSettings,
    StepSettings,
    ModelSettings,
    DataSettings,
):
    """Base of the configs of runs; `settings.variant` gives a shared setting another default."""

    help_order = HEADINGS
    result_files = ()  # names of files that the run writes besides those of every run

    def __post_init__(self):
        check_settings(self)
        for name in DROPOUT_FIELDS:
            value = getattr(self, name)
            if value < 0 and value != -1:
                raise InputError(f"`{name}` must be at least 0, or -1. Received: {value}.")
