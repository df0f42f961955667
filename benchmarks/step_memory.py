"""Command line: how much memory a training step takes, with and without `--remat`.

python -m benchmarks.step_memory --bert_config_file=bert-mini --batch_size=8 --remat
"""

import dataclasses
import sys
import tempfile

from benchmarks.peak_memory import MemoryWatch
from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import check_divides, check_settings, setting
from bert_packed.training.engines import choose_backend

NUM_STEPS = 2
DEPTH = 3  # sequences in a pack, as in the papers
MEBIBYTE = 2**20
DESCRIPTION = """
Takes two training steps on random tokens and prints how far the process grew above what was resident before:
by the compiler, the model, the optimizer and the step. A process grows only once: run the command again for
another setting.

Under KERAS_BACKEND=jax also the temporaries of the compiled step as XLA counts them: what it holds besides
weights and optimizer, which nothing else on the machine changes.
"""


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs a step", minimum=1)
    micro_batch_size: int = setting(0, "packs computed at once; 0 = all of the step's", minimum=0)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    remat: bool = setting(False, "compute each encoder block again in the backward pass")
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        check_divides(self, "micro_batch_size", "batch_size")


def main(config):
    """Measure, and print the table."""
    backend = choose_backend()
    # TensorFlow and Keras: not for --help
    from benchmarks.benchmark_batches import make_batches
    from benchmarks.benchmark_engine import build_engine
    from bert_packed.config import load_model_config

    model_config = load_model_config(config.bert_config_file)
    sizes = (config.max_seq_length, DEPTH, config.batch_size, NUM_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        packed, _ = make_batches(folder, "", *sizes, model_config)
    with MemoryWatch() as watch:
        engine = build_engine(model_config, config.remat, config.micro_batch_size or None)
        for batch in packed.batches:
            float(engine.train_step(batch)["num_sequences"])  # wait for the device
    row = {"backend": backend, "remat": str(config.remat).lower()}
    row["process, MiB"] = watch.largest_growth and watch.largest_growth / MEBIBYTE
    if backend == "jax":
        row["temporaries, MiB"] = engine.count_train_step(packed.batches[0])["temporary bytes"] / MEBIBYTE
    print_table([row], config.json)


if __name__ == "__main__":
    sys.exit(run(main, MemoryConfig, DESCRIPTION))
