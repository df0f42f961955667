"""Time added to a training step by the restarts of a Mamba, or by the host.

python -m benchmarks.overhead --of=restarts --bert_config_file=mamba-tiny
KERAS_BACKEND=jax python -m benchmarks.overhead --of=host --bert_config_file=bert-tiny --max_seq_length=64
"""

import dataclasses
import statistics
import sys

import numpy as np

from benchmarks.runner import Settings, added_row, median_row, show
from benchmarks.synthetic_data import bert_batch, spec_of, token_batch, wikipedia_corpus
from benchmarks.training_steps import build_engine, first_head, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.engines import choose_backend

PARTS = RESTARTS, HOST = "restarts", "host"
WITH, WITHOUT = "with", "without"
MOST = 2.0  # percent of a training step that restarts may add
DEPTH = 3  # sequences in a pack of random tokens, as in the papers
SMALL_VOCABULARY = 1024  # logits of a large one would hide the rest
NUM_STEPS = 10  # in a row, of one repeat
AT_ONCE, LATE = "after each step, variables assigned", "one step late"


@dataclasses.dataclass(frozen=True)
class OverheadConfig(Settings):
    """Interleaves training steps with and without what adds the time, and prints what it adds, in percent:
    the median of neighboring times; `from` and `to` are its interval of 95 %.

    host      gaps between steps: figures read and variables assigned after each step, or figures read one
              step late, as the loop does it, against steps that nobody reads
    restarts  states and convolutions of a Mamba that restart with each sequence, against none

    What packs and their attention mask add to a BERT's step is in benchmarks.training_speed.
    """

    of: str = setting(RESTARTS, "what adds the time", choices=PARTS)
    bert_config_file: str = setting("", "size, or config file, of the BERT or Mamba", required=True)
    batch_size: int = setting(4, "packs a step", minimum=1)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    repeats: int = setting(41, "timed steps of each", minimum=1)


def main(config):
    """Measure, print and write."""
    choose_backend()
    if config.of == HOST:
        seconds = time_interleaved(host_steps(config), config.repeats)
        rows = [{"figures are read": way, **gap_row(seconds, way)} for way in (AT_ONCE, LATE)]
        show("overhead", config, {config.of: rows})
        return
    seconds = time_interleaved(restart_steps(config), config.repeats)
    show("overhead", config, {config.of: [overhead_row(seconds)]})


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
