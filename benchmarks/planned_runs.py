"""What a run of a training command is to be: its flags, its command line, its settings.

DIR/NAME is the output directory of a run.
"""

import dataclasses
import math
import shlex
import sys
from pathlib import Path

from bert_packed.core.command_line import TOP, parse
from bert_packed.core.settings import InputError
from bert_packed.runs.finetuning_config import SquadConfig
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.schema import CAUSAL_LM

PRETRAINING, SQUAD = "run_pretraining.py", "run_squad.py"
CONFIGS = {PRETRAINING: TrainConfig, SQUAD: SquadConfig}
# Without their defaults a run would not be gone on with, not be scored, or see other numbers of sequences
AT_DEFAULT = {
    PRETRAINING: ("overwrite", "compile_only", "initial_batch_size", "batch_warmup_steps"),
    SQUAD: ("overwrite", "do_train", "do_predict"),
}
MOST_UNEVEN = 0.05


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a training command.

    Attributes:
        variant: What it is called in tables and pictures.
        seed: Of weights, dropout and order of the data.
        flags: Dict from flag to value, without `output_dir`; an empty value is left out.
        sequences_per_step: Expected.
        more_flags: Further flags, as one text; they come last, and change none of these.
        program: A key of `CONFIGS`.
        more_flags_name: The flag by which the user gave them.
    """

    variant: str
    seed: int
    flags: dict
    sequences_per_step: float
    more_flags: str = ""
    program: str = PRETRAINING
    more_flags_name: str = "run_flags"

    @property
    def name(self):
        """Of its folder."""
        return f"{self.variant}-seed{self.seed}"


def parse_names(text, known):
    """Different ones of some names, with commas; raises `ValueError`."""
    wrong = [name for name in text.split(",") if name not in known]
    if wrong or len(set(text.split(","))) < len(text.split(",")):
        raise ValueError(f"different ones of {', '.join(known)}, separated by commas")
    return text


def parse_seeds(text):
    """`--seeds`: different whole numbers with commas; raises `ValueError`."""
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise ValueError("different whole numbers, separated by commas")
    return text


def seeds_of(text):
    """The numbers of a text that `parse_seeds` takes: list of int."""
    return [int(seed) for seed in text.split(",")]


def command_of(run, folder):
    """The command line of a run, a `Run`, in DIR, `folder`: list of arguments; raises `InputError`."""
    flags = {**run.flags, "output_dir": Path(folder) / run.name}
    given = [f"--{name}={value}" for name, value in flags.items() if value != ""]
    try:
        more = shlex.split(run.more_flags)
    except ValueError as error:
        raise InputError(
            f"`{run.more_flags_name}` must be flags as in a shell. Received: {run.more_flags}: {error}."
        ) from error
    return [sys.executable, str(TOP / run.program), *given, *more]


def settings_of(run, folder):
    """What the command line of a run means: a config of `CONFIGS`.

    Raises:
        InputError: a flag is wrong, or `more_flags` change what the run is.
    """
    settings = parse(CONFIGS[run.program], command_of(run, folder)[1:])
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    wanted = {name: defaults[name] if value == "" else value for name, value in run.flags.items()}
    wanted |= {name: defaults[name] for name in AT_DEFAULT[run.program]}
    wanted["output_dir"] = str(Path(folder) / run.name)
    for name, value in wanted.items():
        if getattr(settings, name) != value:
            raise InputError(
                f"`{run.more_flags_name}` must leave {name} as it is for {run.name}, {value!r}. "
                f"Received: {getattr(settings, name)!r}."
            )
    if run.program == PRETRAINING and settings.objective == CAUSAL_LM:
        raise InputError(
            f"`{run.more_flags_name}` must give an objective with masked tokens. Received: {CAUSAL_LM}."
        )
    return settings


def plan_pretraining(config, variant, seed, num_sequences, flags, per_pack, more_flags_name):
    """A pre-training that sees so many sequences.

    Args:
        config: With `bert_config_file`, `micro_batch_size`, `warmup_share`, `num_points`, `max_eval_steps`,
            and the text of more flags.
        variant, seed: As of `Run`.
        num_sequences: To see.
        flags: Dict of its own flags, with `train_batch_size`.
        per_pack: Mean sequences in a pack of its data.
        more_flags_name: Name of the field of `config` with more flags.

    Returns:
        `Run`.
    """
    per_step = flags["train_batch_size"] * per_pack
    num_steps = max(1, round(num_sequences / per_step))
    interval = math.ceil(num_steps / config.num_points)
    planned = {
        "bert_config_file": config.bert_config_file,
        "micro_batch_size": config.micro_batch_size,
        **flags,
        "num_train_steps": num_steps,
        "num_warmup_steps": round(config.warmup_share * num_steps),
        "random_seed": seed,
        "log_steps": interval,
        "eval_steps": interval,
        "max_eval_steps": config.max_eval_steps,
        "save_checkpoints_steps": interval,
        "keep_checkpoint_max": 1,
    }
    more_flags = getattr(config, more_flags_name)
    return Run(variant, seed, planned, per_step, more_flags, more_flags_name=more_flags_name)


def divide_evenly(flags, packing_factor, config, batch_name):
    """Flags whose updates see as many sequences in packs.

    Args:
        flags: Dict with `train_batch_size`, in sequences.
        packing_factor: p.
        config: With `micro_batch_size`: batches are whole ones.
        batch_name: Name of the field of `config` with the number of sequences.

    Returns:
        Dict of flags, `train_batch_size` in packs.

    Raises:
        InputError: the nearest number of packs holds over 5 % more or fewer.
    """
    multiple, wanted = config.micro_batch_size or 1, flags["train_batch_size"]
    num_packs = max(1, round(wanted / packing_factor / multiple)) * multiple
    divided = {**flags, "train_batch_size": num_packs, "packing_correction": "none"}
    seen = num_packs * packing_factor
    if abs(seen / wanted - 1) > MOST_UNEVEN:
        name = "micro_batch_size" if config.micro_batch_size > 1 else batch_name
        raise InputError(
            f"`{name}` must let an update on packs see within {MOST_UNEVEN:.0%} of {batch_name}={wanted}. "
            f"Received: {getattr(config, name)}, by which {num_packs} packs of {packing_factor:.3g} "
            f"sequences hold {seen:.4g}."
        )
    return divided
