"""Choices from text, packs and machine: model, batch, steps and learning rate of `bert-packed train`."""

import contextlib
import dataclasses
import itertools

from bert_packed.architectures.registry import config_json, load_model_config
from bert_packed.core.storage import write_json
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.schema import MLM
from bert_packed.text_to_model.config import DEFAULT_EPOCHS

GIVEN = "given"
MODEL_FILE = "bert_config.json"  # of the model that `init_checkpoint` is
LARGE_TEXT_BYTES = 100 * 2**20
SMALL_VOCABULARY, LARGE_VOCABULARY = 8192, 30_522
CPU_MODEL, ACCELERATOR_MODEL = "bert-mini", "bert-base"
STEPS_OF_A_TRAINING = 10_000  # aimed at, within the limits of a step's sequences
LEAST_SEQUENCES, MOST_SEQUENCES = 32, 256
CPU_TOKENS_AT_ONCE = 4096  # more are no faster on CPUs
ACCELERATOR_TOKENS_AT_ONCE = 2**16
SHARE_OF_MEMORY = 0.5  # the rest is for data, other programs, and what the compiler does not count
WARMUP_SHARE, NUM_EVALUATIONS = 0.1, 10
LEAST_INTERVAL = 50  # steps between checkpoints and evaluations
# Peak learning rates of Adam by the model's width: BERT's and RoBERTa's for base and large, ours below
RATES = ((256, 1e-3), (512, 5e-4), (768, 2e-4))
LEAST_RATE = 1e-4
STARTED_RATE = 5e-5  # of a model that is trained already: the default of fine-tuning


@dataclasses.dataclass(frozen=True)
class Choice:
    """A setting that was chosen, for people."""

    setting: str
    value: object
    why: str


def choose_vocab_size(config, num_bytes):
    """Tokens of a vocabulary that is trained on a number of bytes of files."""
    if config.vocab_size:
        return config.vocab_size
    return LARGE_VOCABULARY if num_bytes >= LARGE_TEXT_BYTES else SMALL_VOCABULARY


def choose_training(config, manifest, folder, platform, num_devices=1):
    """Choose all but the steps, and what memory and hours change of their size.

    Args:
        config: `TrainConfig`.
        manifest: Manifest of the training packs.
        folder: `OutputFolder`.
        platform: "cpu", "gpu" or "tpu".
        num_devices: Devices that share a step.

    Returns:
        (`PretrainingConfig`, list of `Choice`).
    """
    on_cpus = platform == "cpu"
    model = _choose_model(config, folder, on_cpus)
    width = load_model_config(model.value).hidden_size
    rate = next((rate for most, rate in RATES if width <= most), LEAST_RATE)
    rate = config.learning_rate or (STARTED_RATE if config.init_checkpoint else rate)
    # The steps are a first guess where hours are given, so that a step can be timed
    sequences = manifest["num_sequences"] * (config.num_train_epochs or DEFAULT_EPOCHS)
    packs = config.train_batch_size or packs_of_a_step(sequences, manifest["packing_factor"])
    most = (CPU_TOKENS_AT_ONCE if on_cpus else ACCELERATOR_TOKENS_AT_ONCE) // config.max_seq_length
    packs, at_once = divide(packs, max(most, 1), bool(config.train_batch_size), num_devices)
    why_rate = (
        "of Adam, from init_checkpoint" if config.init_checkpoint else f"of Adam, for a width of {width}"
    )
    choices = [model, Choice("learning_rate", rate, GIVEN if config.learning_rate else why_rate)]
    training = PretrainingConfig(
        **places_of(config, folder, model.value),
        do_eval=bool(config.eval_fraction),
        init_checkpoint=config.init_checkpoint,
        objective=MLM,
        masking="dynamic",
        optimizer="adam",
        learning_rate=rate,
        train_batch_size=packs,
        micro_batch_size=at_once,
        eval_batch_size=at_once,
        random_seed=config.random_seed,
        attention=config.attention,
        distribution=config.distribution,
        num_warmup_steps=0,
    )
    return training, choices


def places_of(config, folder, bert_config_file):
    """The settings of a training that name files of an output directory: dict."""
    is_stored = config.init_checkpoint and not config.bert_config_file
    return {
        "input_file": folder.packed_files("train"),
        "eval_input_file": folder.packed_files("eval") if config.eval_fraction else "",
        "output_dir": folder.run,
        "vocab_file": folder.vocab_file,
        "bert_config_file": folder.path("flags", MODEL_FILE) if is_stored else bert_config_file,
    }


def packs_of_a_step(num_sequences, factor):
    """Packs of a step, for a training on a number of sequences, at a packing factor."""
    sequences = min(max(num_sequences // STEPS_OF_A_TRAINING, LEAST_SEQUENCES), MOST_SEQUENCES)
    return max(round(sequences / factor), 1)


def divide(packs, most, is_given, num_devices=1):
    """Packs of a step in equal micro-batches of at most `most` a device: (packs, packs at once).

    Unless their number is given, packs are rounded up to fuller micro-batches:

        10 packs, at most 4 at once   ->   (12, 4), given (10, 2)
    """
    of_device = -(-packs // num_devices)
    if is_given:
        sizes = range(1, min(most, of_device) + 1)
        return packs, num_devices * max(size for size in sizes if of_device % size == 0)
    num_parts = -(-of_device // most)
    at_once = num_devices * -(-of_device // num_parts)
    return at_once * num_parts, at_once


def fit_memory(training, program, memory_bytes, is_given, num_devices=1):
    """A `PretrainingConfig` whose micro-batch fits a memory, by the program that was compiled for its own.

    `is_given` and `num_devices` are as in `divide`. Returns (config, `Choice`).
    """
    from bert_packed.training.step_report import size_that_fills

    at_once = training.packs_at_once // num_devices
    why = "as many as are computed well at once; the memory has room for them"
    if memory_bytes and program.peak_bytes is not None:
        most = max(size_that_fills(SHARE_OF_MEMORY * memory_bytes, program, at_once), 1)
        if most < at_once:
            training = _with_batch(training, *divide(training.train_batch_size, most, is_given, num_devices))
            why = f"fits half of {memory_bytes / 2**30:.1f} GiB"
    return training, Choice("micro_batch_size", training.packs_at_once, why)


def _with_batch(training, packs, at_once):
    sizes = {"train_batch_size": packs, "micro_batch_size": at_once, "eval_batch_size": at_once}
    return dataclasses.replace(training, **sizes)


def choose_steps(config, training, manifest, step_seconds=None, num_devices=1):
    """A `PretrainingConfig` with its steps, by epochs or by hours of steps of `step_seconds`.

    Hours also choose the packs of a step, unless given. Returns (config, list of `Choice`).
    """
    packs, factor = training.train_batch_size, manifest["packing_factor"]
    if config.train_hours:
        pack_seconds = step_seconds / packs
        num_packs = config.train_hours * 3600 / pack_seconds
        if not config.train_batch_size:
            wanted = packs_of_a_step(num_packs * factor, factor)
            most = training.packs_at_once // num_devices
            training = _with_batch(training, *divide(wanted, most, False, num_devices))
            packs = training.train_batch_size
        steps = max(round(num_packs / packs), 1)
        why = f"{config.train_hours:g} h of steps of {pack_seconds * packs:.3g} s"
    else:
        epochs = config.num_train_epochs or DEFAULT_EPOCHS
        steps = max(round(epochs * manifest["num_packs"] / packs), 1)
        why = f"{epochs:g} times {manifest['num_packs']:,} packs"
    why_packs = f"{packs * factor:.0f} sequences at packing factor {factor:.2f}"
    every = max(steps // NUM_EVALUATIONS, LEAST_INTERVAL)
    warmup = int(steps * WARMUP_SHARE)
    training = dataclasses.replace(
        training,
        num_train_steps=steps,
        num_warmup_steps=warmup,
        eval_steps=every if training.do_eval else 0,
        save_checkpoints_steps=min(every, 1000),
        log_steps=min(max(steps // NUM_EVALUATIONS, 1), 10),
    )
    return training, [
        Choice("train_batch_size", packs, GIVEN if config.train_batch_size else why_packs),
        Choice("num_train_steps", steps, why),
        Choice("num_warmup_steps", warmup, f"{WARMUP_SHARE:.0%} of the steps".replace("%", " %")),
    ]


def _choose_model(config, folder, on_cpus):
    if config.bert_config_file:
        return Choice("bert_config_file", config.bert_config_file, GIVEN)
    if config.init_checkpoint:
        from bert_packed.checkpoints import starting_weights

        path = folder.path("flags", MODEL_FILE)
        write_json(path, config_json(starting_weights.read_model_config(config.init_checkpoint)))
        return Choice("bert_config_file", path, "as stored with init_checkpoint")
    if on_cpus:
        return Choice("bert_config_file", CPU_MODEL, "there is no GPU or TPU")
    return Choice("bert_config_file", ACCELERATOR_MODEL, "there is a GPU or TPU")


def time_step(config):
    """Seconds of a step of a run that has not begun: the median of a few, after one that compiles."""
    from bert_packed.runs.interleaved_timing import Contender, compare  # Keras: not for --help
    from bert_packed.runs.pretraining import NUM_TIMED_STEPS, Run
    from bert_packed.runs.pretraining_data import train_batches

    run = Run(config)
    run.read_data()
    with contextlib.closing(train_batches(run)) as ahead:
        batches = list(itertools.islice(ahead, NUM_TIMED_STEPS))
    step = Contender("steps", run.build_engine().train_step, batches, 1.0, 1.0)
    return compare([step], NUM_TIMED_STEPS)[0]["seconds_per_step"]
