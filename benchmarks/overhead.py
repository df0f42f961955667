"""Time added to a training step by a part of packing (fresh masks, restarts of a Mamba), or by the host.

python -m benchmarks.overhead --input_file='sample_data/packed_512/train/*.tfrecord'
python -m benchmarks.overhead --of=restarts --bert_config_file=mamba-tiny
KERAS_BACKEND=jax python -m benchmarks.overhead --of=host --bert_config_file=bert-tiny --max_seq_length=64
"""

import dataclasses
import statistics
import sys
import tempfile

import numpy as np

from benchmarks.runner import Settings, added_row, median_row, show
from benchmarks.synthetic_data import bert_batch, spec_of, token_batch, wikipedia_corpus
from benchmarks.training_steps import build_engine, first_head, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, check_divides, setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines import choose_backend

PARTS = FRESH_MASKS, RESTARTS, HOST = "fresh_masks", "restarts", "host"
WITH, WITHOUT = "with", "without"
MOST = 2.0  # percent of a training step that a part may add
DEPTH = 3  # sequences in a pack of random tokens, as in the papers
SMALL_VOCABULARY = 1024  # logits of a large one would hide the rest
NUM_STEPS = 10  # in a row, of one repeat
AT_ONCE, LATE = "after each step, variables assigned", "one step late"


@dataclasses.dataclass(frozen=True)
class OverheadConfig(Settings):
    """Interleaves training steps with and without one part of packing, and prints what the part adds, in
    percent: the median of neighboring times; `from` and `to` are its interval of 95 %.

    fresh_masks  --masking=dynamic in a step of pre-training, against the masks of the records: the same packs
                 in the same order, and one compiled step
    host         gaps between steps: figures read and variables assigned after each step, or figures read one
                 step late, as the loop does it, against steps that nobody reads
    restarts     states and convolutions of a Mamba that restart with each sequence, against none

    What packs and their attention mask add to a BERT's step is in benchmarks.training_speed.
    """

    of: str = setting(FRESH_MASKS, "part of packing", choices=PARTS)
    bert_config_file: str = setting("bert-mini", "size, or config file, of the BERT or Mamba")
    batch_size: int = setting(4, "packs a step", minimum=1)
    micro_batch_size: int = setting(
        0, "packs computed at once; 0 = all of the step's", minimum=0, only_with=f"of={FRESH_MASKS}"
    )
    max_seq_length: int = setting(512, "tokens per pack", minimum=16, only_with=f"of={RESTARTS},{HOST}")
    input_file: str = setting(
        "", "packed training TFRecords: comma-separated paths or globs", only_with=f"of={FRESH_MASKS}"
    )
    vocab_file: str = setting(
        "", "their vocabulary; empty = as run_pretraining.py finds it", only_with=f"of={FRESH_MASKS}"
    )
    objective: str = setting(
        "mlm_nsp", "what is learned", choices=("mlm_nsp", "mlm"), only_with=f"of={FRESH_MASKS}"
    )
    repeats: int = setting(41, "timed steps of each", minimum=1)

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "micro_batch_size", "batch_size")
        if self.of == FRESH_MASKS and not self.input_file:
            raise InputError(f"`input_file` must be given with of={FRESH_MASKS}. Received: nothing.")


def main(config):
    """Measure, print and write."""
    choose_backend()
    if config.of == HOST:
        seconds = time_interleaved(host_steps(config), config.repeats)
        rows = [{"figures are read": way, **gap_row(seconds, way)} for way in (AT_ONCE, LATE)]
        show("overhead", config, {config.of: rows})
        return
    with tempfile.TemporaryDirectory() as folder:
        steps = fresh_mask_steps(config, folder) if config.of == FRESH_MASKS else restart_steps(config)
        row = overhead_row(time_interleaved(steps, config.repeats))
    show("overhead", config, {config.of: [row]})


def overhead_row(seconds):
    """The row of the table, from seconds: a dict from `WITH` and `WITHOUT` to a list."""
    return {
        **{f"{way}, s": statistics.median(seconds[way]) for way in (WITH, WITHOUT)},
        **added_row(seconds[WITH], seconds[WITHOUT]),
        "at most, %": MOST,
    }


def gap_row(all_seconds, way):
    """Gaps of a way of reading, from seconds of `NUM_STEPS` with it and `WITHOUT`."""
    seconds, baseline = all_seconds[way], all_seconds[WITHOUT]
    gaps = [1000 * (one - other) / NUM_STEPS for one, other in zip(seconds, baseline, strict=True)]
    return {
        "step, ms": 1000 * statistics.median(seconds) / NUM_STEPS,
        **median_row("gap, ms", gaps),
        "gap, % of the step alone": added_row(seconds, baseline)["added, %"],
    }


def host_steps(config):
    """Steps of a BERT: dict from `AT_ONCE`, `LATE` and `WITHOUT` reading to a function."""
    model_config = load_model_config(config.bert_config_file, SMALL_VOCABULARY)
    rng, length = np.random.default_rng(0), config.max_seq_length
    packs = wikipedia_corpus(length, DEPTH).draw_packs(config.batch_size, rng)
    batch = bert_batch(packs, spec_of(packs, length), model_config.vocab_size, rng)
    engine = build_engine(model_config)

    def wait_for_each(_):
        for _ in range(NUM_STEPS):
            engine.train_step(batch)

    def read_late(_):
        sums = engine.start_step(batch)
        for _ in range(NUM_STEPS - 1):
            before, sums = sums, engine.start_step(batch)
            engine.read(before)
        engine.read(sums)

    def read_last(_):
        for _ in range(NUM_STEPS):
            sums = engine.start_step(batch)
        engine.read(sums)

    return {AT_ONCE: wait_for_each, LATE: read_late, WITHOUT: read_last}


def fresh_mask_steps(config, folder):
    """Training steps on a run's batches: dict from `WITH` and `WITHOUT` fresh masks to a function."""
    engine, batches = masked_batches(config, folder)

    def stepping(its_batches):
        return lambda _: engine.train_step(next(its_batches))

    return {way: stepping(its_batches) for way, its_batches in batches.items()}


def masked_batches(config, folder):
    """A run's engine, and its endless batches: dict from `WITH` and `WITHOUT` fresh masks."""
    from bert_packed.runs.pretraining import Run
    from bert_packed.runs.pretraining_data import train_batches

    dynamic = PretrainingConfig(
        input_file=config.input_file,
        output_dir=folder,
        objective=config.objective,
        bert_config_file=config.bert_config_file,
        train_batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        masking="dynamic",
        vocab_file=config.vocab_file,
    )
    run = Run(dynamic)
    run.read_data()
    static = dataclasses.replace(run, data=dataclasses.replace(run.data, masking=None))
    return run.build_engine(), {WITH: train_batches(run), WITHOUT: train_batches(static)}


def restart_steps(config):
    """Training steps of a Mamba on packs: dict from `WITH` and `WITHOUT` restarts to a function."""
    model_config = load_model_config(config.bert_config_file, SMALL_VOCABULARY)
    if first_head(model_config) != CAUSAL_LM:
        raise InputError(
            f"`bert_config_file` must be a Mamba with of={RESTARTS}. Received: {config.bert_config_file}."
        )
    rng, length = np.random.default_rng(0), config.max_seq_length
    packs = wikipedia_corpus(length, DEPTH).draw_packs(config.batch_size, rng)
    batch = token_batch(packs, spec_of(packs, length), model_config.vocab_size, rng)
    endless = dataclasses.replace(model_config, ablation_no_position_reset=True)
    configs = {WITH: model_config, WITHOUT: endless}
    return {way: stepping(build_engine(one), [batch]) for way, one in configs.items()}


if __name__ == "__main__":
    sys.exit(run(main, OverheadConfig))
