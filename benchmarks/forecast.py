"""Memory and time of a packed training step on accelerators that are not here, by their compilers.

KERAS_BACKEND=jax python -m benchmarks.forecast --json=forecast.json
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.runner import Settings, parse_names, show
from benchmarks.synthetic_data import VOCAB_SIZE, sums_of_a_row, wikipedia_corpus
from benchmarks.training_steps import first_head, objective_kind
from bert_packed.architectures.registry import MODEL_SIZES
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.schema import CAUSAL_LM

DEPTH = 3  # sequences in a pack, as in the papers
NUM_RECORDS = 8  # only their shapes count
GIBIBYTE = 2**30
ATTENTIONS = ("auto", "dense")
COMMAND = Path(__file__).resolve().parent.parent / "run_pretraining.py"


@dataclasses.dataclass(frozen=True)
class ForecastConfig(Settings):
    """Compiles the step of run_pretraining.py (--compile_for) for each model, attention and device; extra
    `aot`. Packs have Wikipedia's lengths at depth 3. Memory is the compiler's plan. Seconds are its
    estimate, no measurement, and missing for GPUs, whose compiler has none. Each step takes a minute or
    two to compile for bert-base.
    """

    models: str = setting(
        "bert-base",
        "sizes of models, with commas",
        parse=lambda text: parse_names(text, MODEL_SIZES),
    )
    attentions: str = setting(
        "auto,dense", "of the steps, with commas", parse=lambda text: parse_names(text, ATTENTIONS)
    )
    devices: str = setting("v5e:1,v6e:1,h100:1", "KIND:SHAPE of --compile_for, with commas, of one device")
    batch_size: int = setting(32, "packs a step, all at once", minimum=1)
    max_seq_length: int = setting(512, "tokens of a pack", minimum=16)


def main(config):
    """Compile, print and write."""
    corpus = wikipedia_corpus(config.max_seq_length, DEPTH)
    rows = []
    with tempfile.TemporaryDirectory(prefix="forecast_") as folder:
        records = os.path.join(folder, "packs.tfrecord")
        for model in config.models.split(","):
            write_packs(records, corpus, MODEL_SIZES[model])
            for attention in config.attentions.split(","):
                for device in config.devices.split(","):
                    report = compiled(config, folder, records, model, attention, device)
                    row = forecast_row(config, device, report, corpus)
                    rows.append({"model": model, "attention": attention, **row})
    show("forecast", config, {"steps": rows}, how="Estimated by the devices' compilers")


def write_packs(path, corpus, model_config):
    """Write a few packs, of the shape of all."""
    from bert_packed.objectives.features import NEXT_TOKENS, RECORDED

    head = first_head(model_config)
    batch = corpus.packed_batch(NUM_RECORDS, VOCAB_SIZE, np.random.default_rng(0), head)
    features = NEXT_TOKENS if head == CAUSAL_LM else RECORDED
    arrays = {one.record_name: batch[one.name] for one in features}
    tfrecords.write_records(path, serialize_examples(arrays))


def compiled(config, folder, records, model, attention, device):
    """The report of a step that a command compiles; raises `InputError` where it cannot."""
    target = os.path.join(folder, "compiled")
    flags = {
        "input_file": records,
        "objective": objective_kind(MODEL_SIZES[model]),
        "bert_config_file": model,
        "attention": attention,
        "train_batch_size": config.batch_size,
        "micro_batch_size": config.batch_size,
        "compile_only": target,
        "compile_for": device,
    }
    # Each device has a process, since a compiler is set up once
    command = [sys.executable, str(COMMAND), *(f"--{name}={value}" for name, value in flags.items())]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise InputError(f"{model} for {device}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return read_json(os.path.join(target, "step.json"))


def forecast_row(config, device, report, corpus):
    """Columns of a table, from a report of `--compile_only`."""
    seconds = report["estimated_seconds"]
    num_tokens = config.batch_size * sums_of_a_row(corpus, is_packed=True)["num_tokens"]
    return {
        "device": device,
        "packs": report["train_batch_size"],
        "memory, GiB": report["peak_bytes"] / GIBIBYTE,
        "of, GiB": report["device_memory_bytes"] / GIBIBYTE,
        "s/step, estimated": seconds,
        "real tokens/s, estimated": seconds and num_tokens / seconds,
    }


if __name__ == "__main__":
    sys.exit(run(main, ForecastConfig))
