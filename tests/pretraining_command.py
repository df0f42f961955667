"""The training command in this process, on tiny data."""

import dataclasses
import json

import recorded_calls
from safetensors.numpy import load_file
from tiny import CONFIG, write_data

from bert_packed import cli
from bert_packed.core import command_line
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training import metrics_log
from bert_packed.training.metrics_log import TIMED_FIGURES


def write_all(folder):
    """Write packs to train on and to evaluate, and a model of one layer; returns the folder."""
    write_data(folder)
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    )
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (folder / "eval").mkdir()
    write_data(folder / "eval", num_packs=(5,), seed=1)
    return folder


def flags_of(data, output_dir, **changes):
    """Flags of a short run: dict."""
    return {
        "input_file": f"{data}/packed-*.tfrecord",
        "eval_input_file": f"{data}/eval/*.tfrecord",
        "output_dir": output_dir,
        "bert_config_file": f"{data}/bert_config.json",
        "train_batch_size": 4,
        "micro_batch_size": 2,
        "eval_batch_size": 2,
        "num_train_steps": 24,
        "num_warmup_steps": 2,
        "learning_rate": 0.01,
        "save_checkpoints_steps": 7,
        "eval_steps": 10,
        "log_steps": 5,
        **changes,
    }


def arguments(data, output_dir, **changes):
    """Flags of a short run: list of arguments."""
    return [f"--{name}={value}" for name, value in flags_of(data, output_dir, **changes).items()]


def run(*arguments):
    """The command in this process: exit status."""
    argv = ["run_pretraining.py", *arguments]
    return command_line.run(cli.pretrain, PretrainingConfig, argv)


def pretrain(**flags):
    """The command in this process: namespace of its status, and of what it printed (`out` and `error`)."""
    return recorded_calls.run(cli.pretrain, PretrainingConfig, **flags)


def assert_refused(message, **flags):
    """Assert that the command refuses flags in one line that holds `message`."""
    recorded_calls.assert_refused(cli.pretrain, PretrainingConfig, message, **flags)


def write_batch(path, batch):
    """Write the packs of a batch to a file."""
    features = {name: batch[ours] for name, ours in BATCH_NAMES.items()}
    tfrecords.write_records(path, serialize_examples(features))


def read_rows(path):
    """The complete rows of a log without figures of a clock; none where there is no log."""
    timed = ("sequences_per_second", "tokens_per_second", *TIMED_FIGURES)
    return [
        {name: value for name, value in row.items() if name not in timed}
        for row in metrics_log.read_rows(path)
    ]


def newest_checkpoint(folder):
    """The newest checkpoint of a run."""
    return max(folder.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name.rpartition("-")[2]))


def assert_same_run(one, other):
    """Assert equal weights, optimizer, random state and logged figures of two runs, bit for bit."""
    newest = [newest_checkpoint(folder) for folder in (one, other)]
    assert newest[0].name == newest[1].name
    for name in ("model.safetensors", "training.safetensors"):
        got, want = (load_file(folder / name) for folder in newest)
        assert got.keys() == want.keys()
        different = [key for key, values in want.items() if got[key].tobytes() != values.tobytes()]
        assert not different, different
    for name in ("metrics.csv", "eval_metrics.csv"):
        assert read_rows(one / name) == read_rows(other / name)
