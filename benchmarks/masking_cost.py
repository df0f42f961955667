"""Command line: what fresh masks cost a step of pre-training, beside the records' own masks.

python -m benchmarks.masking_cost --input_file='sample_data/packed_128/train/*.tfrecord'
"""

import dataclasses
import statistics
import sys
import tempfile

from bert_packed.core.command_line import print_table, run
from bert_packed.core.settings import InputError, check_divides, check_settings, setting
from bert_packed.training.engines import choose_backend

WAYS = ("static", "dynamic")
MOST = 2.0  # percent of a step, asked
DESCRIPTION = """
Measures training steps in turns, with the masks of the records (static) and with masks drawn while reading
(dynamic): the batches of a run, the same packs in the same order, and one compiled step.
"""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Every flag of the command; checks itself, raises `InputError`."""

    input_file: str = setting("", "packed training TFRecords: comma-separated paths or globs")
    vocab_file: str = setting("", "their vocabulary; empty = as run_pretraining.py finds it")
    objective: str = setting("mlm_nsp", "what is learnt", choices=("mlm_nsp", "mlm"))
    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    train_batch_size: int = setting(8, "packs a step", minimum=1)
    micro_batch_size: int = setting(0, "packs computed at once; 0 = all of the step's", minimum=0)
    do_whole_word_mask: bool = setting(False, "draw whole words")
    repeats: int = setting(41, "timed steps of each way", minimum=1)
    json: str = setting("", "also write the printed table to this file, as JSON")

    def __post_init__(self):
        check_settings(self)
        if not self.input_file:
            raise InputError("`input_file` must be given. Received: nothing.")
        check_divides(self, "micro_batch_size", "train_batch_size")


def main(config):
    """Measure, and print the table."""
    choose_backend()
    from benchmarks.this_machine import cpu_name

    with tempfile.TemporaryDirectory() as folder:
        engine, batches = read(config, folder)
        row = measure(engine, batches, config.repeats)
    print(f"CPU: {cpu_name()}")
    print_table([row], config.json)


def read(config, folder):
    """A compiled step, and the batches of a run under either masking.

    Args:
        config: `BenchmarkConfig`.
        folder: For what a run keeps about its files.

    Returns:
        Engine, and dict from `WAYS` to endless batches.

    Raises:
        InputError: as of `pretraining_data.read_data`, or the records do not fit the model.
    """
    # TensorFlow and Keras: not for --help
    from bert_packed.config import load_model_config
    from bert_packed.runs import pretraining, pretraining_data
    from bert_packed.runs.pretraining_config import TrainConfig

    of_run = {
        name: getattr(config, name)
        for name in ("input_file", "objective", "bert_config_file", "train_batch_size", "micro_batch_size")
    }
    static = TrainConfig(output_dir=folder, **of_run)
    drawn = dataclasses.replace(
        static, masking="dynamic", vocab_file=config.vocab_file, do_whole_word_mask=config.do_whole_word_mask
    )
    data = pretraining_data.read_data(drawn)
    model_config = load_model_config(config.bert_config_file, data.train.vocab_size)
    pretraining_data.check_fits(data, model_config, drawn)
    engine = pretraining.build_engine(static, model_config, data)
    batches = {
        name: pretraining.train_batches(static, model_config, engine.objective, data.train, masking)
        for name, masking in zip(WAYS, (None, data.masking), strict=True)
    }
    return engine, batches


def measure(engine, batches, num_repeats):
    """Time steps in alternating turns, from the wish for a batch to the end of its step.

    Args:
        engine, batches: Of `read`.
        num_repeats: Steps of each way.

    Returns:
        Dict of median seconds `static, s` and `dynamic, s`, and of what fresh masks add in percent:
        `cost, %`, the median of neighbouring turns, `from` and `to`, between which it lies with a confidence
        of 95 %, and `asked`, at most.
    """
    from bert_packed.runs.interleaved_timing import median_interval, ratios, time_interleaved

    def way(its_batches):
        def step(_):
            float(engine.train_step(next(its_batches))["num_sequences"])  # wait for the device

        return step

    seconds = time_interleaved({name: way(batches[name]) for name in WAYS}, num_repeats)
    added = [100 * (ratio - 1) for ratio in ratios(seconds["dynamic"], seconds["static"])]
    low, high = median_interval(added)
    medians = {f"{name}, s": statistics.median(seconds[name]) for name in WAYS}
    return {**medians, "cost, %": statistics.median(added), "from": low, "to": high, "asked": MOST}


if __name__ == "__main__":
    sys.exit(run(main, BenchmarkConfig, DESCRIPTION))
