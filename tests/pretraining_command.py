"""The training command in this process, on tiny data."""

import dataclasses
import json

from tiny import CONFIG, write_data

from bert_packed import cli
from bert_packed.core import command_line
from bert_packed.objectives.features import BATCH_NAMES
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training import metrics_log
from bert_packed.training.training_metrics import TIMED_FIGURES


def write_all(folder):
    """Packs to train on, and others to evaluate, with the config of a model of one layer: the folder."""
    write_data(folder)
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
    )
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (folder / "eval").mkdir()
    write_data(folder / "eval", num_packs=(5,), seed=1)
    return folder


def arguments(data, output_dir, **changes):
    """Flags of a short run."""
    flags = {
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
    return [f"--{name}={value}" for name, value in flags.items()]


def run(*arguments):
    """The command in this process: exit status."""
    return command_line.run(
        cli.pretrain,
        PretrainingConfig,
        ["run_pretraining.py", *arguments],
    )


def write_batch(path, batch, leave_out=None):
    """The packs of a batch in a file, all features or all but one."""
    features = {name: batch[ours] for name, ours in BATCH_NAMES.items() if name != leave_out}
    tfrecords.write_records(path, serialize_examples(features))


def read_rows(path):
    """The complete rows of a log without figures of a clock; none where there is no log."""
    timed = ("sequences_per_second", "tokens_per_second", *TIMED_FIGURES)
    return [
        {name: value for name, value in row.items() if name not in timed}
        for row in metrics_log.read_rows(path)
    ]
