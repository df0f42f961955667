"""Memory of a training step, with and without `--remat`, by length of the pack; peaks of processes.

python -m benchmarks.step_memory --bert_config_file=bert-mini --batch_size=8 --remat
"""

import dataclasses
import os
import sys
import threading

import numpy as np

from benchmarks.runner import Settings, show
from benchmarks.synthetic_data import check_positions, wikipedia_corpus
from benchmarks.training_steps import build_engine, first_head, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, check_divides, setting
from bert_packed.training.engines import choose_backend

NUM_STEPS = 2
DEPTH = 3  # sequences in a pack, as in the papers
MEBIBYTE, KIBIBYTE = 2**20, 2**10
PROCESSES = "/proc"
SECONDS_BETWEEN_LOOKS = 0.05


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
    rows, rng = [], np.random.default_rng(0)
    for length in map(int, config.lengths.split(",")):
        check_positions(length, model_config)
        corpus, head = wikipedia_corpus(length, DEPTH), first_head(model_config)
        batch = corpus.packed_batch(config.batch_size, model_config.vocab_size, rng, head)
        with MemoryWatch() as watch:
            engine = build_engine(model_config, config.micro_batch_size, remat=config.remat or None)
            step = stepping(engine, [batch])
            for repeat in range(NUM_STEPS):
                step(repeat)
        program = engine.step_program(batch)
        growth = None if rows else watch.largest_growth
        rows.append(memory_row(length, config, program.temporary_bytes, growth))
    show("step_memory", config, {"memory": rows})


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


class MemoryWatch:
    """Watches the memory of this process and of those that it starts while a block runs.

        with MemoryWatch() as watch:
            pack(config)
        watch.largest_growth, watch.total_growth

    The base is what is resident when the block begins, the imports, for the processes that are started too:
    they import the same. What a process takes in its last twentieth of a second may be missed.

    Attributes:
        largest_growth: Bytes that the process that grew most had above the base; None where the system
            does not say, which is everywhere but on Linux.
        total_growth: Sum over all processes, at least what they took together: their peaks need not coincide.
    """

    def __init__(self):
        self.largest_growth = self.total_growth = None
        self._base, self._peaks = None, {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_until_over, daemon=True)

    def __enter__(self):
        self._base = read_memory(os.getpid(), "VmRSS")
        if self._base is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception):
        if self._base is None:
            return
        self._is_over.set()
        self._thread.join()
        # The thread may have looked last before this process took most; the others have ended
        self._look([os.getpid()])
        growths = [max(0, peak - self._base) for peak in self._peaks.values()]
        self.largest_growth, self.total_growth = max(growths), sum(growths)

    def _look_until_over(self):
        while not self._is_over.wait(SECONDS_BETWEEN_LOOKS):
            self._look(find_descendants(os.getpid()))

    def _look(self, processes):
        for process in processes:
            # `ru_maxrss` looks like the same number, but a process inherits it from the one that started it
            peak = read_memory(process, "VmHWM")
            if peak is not None:
                self._peaks[process] = max(peak, self._peaks.get(process, 0))


def read_memory(process, field):
    """A memory field of a process in bytes, "VmRSS", resident, or "VmHWM", the most; None if unknown."""
    try:
        with open(f"{PROCESSES}/{process}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(lines[field].split()[0]) * KIBIBYTE if field in lines else None


def find_descendants(process):
    """The processes that a process has started, and those that they have: ascending list of int."""
    children = {}
    for name in filter(str.isdecimal, os.listdir(PROCESSES)):
        try:
            with open(f"{PROCESSES}/{name}/stat") as file:
                # The name in parentheses may hold anything: what follows the last one is regular
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(name))
    found, left = [], [process]
    while left:
        started = children.get(left.pop(), [])
        found += started
        left += started
    return sorted(found)


if __name__ == "__main__":
    sys.exit(run(main, MemoryConfig))
