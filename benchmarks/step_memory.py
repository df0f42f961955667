"""Memory of a training step, with and without `--remat`, by length of the pack.

python -m benchmarks.step_memory --bert_config_file=bert-mini --batch_size=8 --remat
"""

import dataclasses
import sys

import numpy as np

from benchmarks.peak_memory import MemoryWatch
from benchmarks.results import Settings, show
from benchmarks.synthetic_data import check_positions, wikipedia_corpus
from benchmarks.training_steps import build_engine, first_head, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, check_divides, setting
from bert_packed.training.engines import choose_backend

NUM_STEPS = 2
DEPTH = 3  # sequences in a pack, as in the papers
MEBIBYTE, KIBIBYTE = 2**20, 2**10


@dataclasses.dataclass(frozen=True)
class MemoryConfig(Settings):
    """Compiles a training step of a BERT or a Mamba on random tokens, takes two of them, and prints the
    temporaries of the program as XLA counts them, which nothing else on the machine changes: what it
    holds besides weights and optimizer (empty where the backend does not say). For the first length also
    how far the process grew above what was resident before: by the compiler, the model, the optimizer and
    the steps. A process grows only once: run the command again for another setting.
    """

    bert_config_file: str = setting("bert-mini", "size, or config file, of the BERT or Mamba")
    batch_size: int = setting(8, "packs a step", minimum=1)
    micro_batch_size: int = setting(0, "packs computed at once; 0 = all of the step's", minimum=0)
    lengths: str = setting("512", "tokens per pack, comma-separated numbers")
    vocab_size: int = setting(0, "tokens in its vocabulary; 0 = the model's own", minimum=0)
    remat: bool = setting(False, "compute each block again in the backward pass")

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "micro_batch_size", "batch_size")
        if not all(length.isdecimal() and int(length) >= 16 for length in self.lengths.split(",")):
            raise InputError(
                f"`lengths` must be numbers from 16, separated by commas. Received: {self.lengths!r}."
            )


def main(config):
    """Measure, print and write."""
    choose_backend()
    model_config = load_model_config(config.bert_config_file, config.vocab_size or None)
    rows = []
    for length in map(int, config.lengths.split(",")):
        check_positions(length, model_config)
        batch = make_batch(model_config, config.batch_size, length)
        with MemoryWatch() as watch:
            engine = build_engine(model_config, config.micro_batch_size, remat=config.remat or None)
            step = stepping(engine, [batch])
            for repeat in range(NUM_STEPS):
                step(repeat)
        (program,) = engine.step_programs(batch)
        rows.append(
            memory_row(length, config, program.temporary_bytes, None if rows else watch.largest_growth)
        )
    show("step_memory", config, {"memory": rows})


def make_batch(model_config, batch_size, length):
    """A batch dict of packs of Wikipedia's lengths, for a BERT or a Mamba."""
    rng, corpus = np.random.default_rng(0), wikipedia_corpus(length, DEPTH)
    return corpus.packed_batch(batch_size, model_config.vocab_size, rng, first_head(model_config))


def memory_row(length, config, temporaries, growth):
    """A row of the table; bytes are None where they are not known."""
    tokens = length * (config.micro_batch_size or config.batch_size)
    return {
        "tokens": length,
        "remat": str(config.remat).lower(),
        "temporaries, MiB": temporaries and temporaries / MEBIBYTE,
        "KiB a token": temporaries and temporaries / KIBIBYTE / tokens,
        "process, MiB": growth and growth / MEBIBYTE,
    }


if __name__ == "__main__":
    sys.exit(run(main, MemoryConfig))
