"""A missing input is told before TensorFlow is imported, and in a cluster once its processes have met."""

import subprocess
import sys

import pytest

from bert_packed import cli
from bert_packed.core.settings import InputError
from bert_packed.parallel import cluster
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training import engines

PROGRAM = """
import sys
from bert_packed.cli import run_command
statuses = [run_command(name, [name, *flags]) for name, flags in {calls!r}]
assert not {{"tensorflow", "huggingface_hub"}} & sys.modules.keys()
assert statuses == [2] * len(statuses)
"""
RUN = {"input_file": "there", "output_dir": "out"}
TASK = {"task_name": "RTE", "data_dir": "missing", "output_dir": "out", "init_checkpoint": "x"}
FOLDER = "`init_checkpoint` must be a folder, or the prefix of a TensorFlow checkpoint"
CALLS = [
    *(
        ("pretrain", {**RUN, name: "missing"}, f"`{name}` must match at least one file. ")
        for name in ("input_file", "eval_input_file", "unpacked_input_file")
    ),
    ("export", {"init_checkpoint": "./missing", "output_dir": "out"}, FOLDER),
    ("audit", {"init_checkpoint": "./missing", "input_file": "there"}, FOLDER),
    ("glue", TASK, "`data_dir` must be an existing folder. "),
]


def test_a_missing_input_is_told_without_tensorflow(tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    calls = [(name, [f"--{flag}={value}" for flag, value in flags.items()]) for name, flags, _ in CALLS]
    program = [sys.executable, "-c", PROGRAM.format(calls=calls)]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for line, (*_, message) in zip(ended.stderr.splitlines(), CALLS, strict=True):
        assert message in line and "missing" in line.rpartition("Received: ")[2]
    assert not (tmp_path / "out").exists()


class JoinedError(Exception):
    """This process has met the others of its cluster."""


@pytest.mark.parametrize("distribution", cluster.DISTRIBUTIONS)
def test_a_cluster_meets_before_files_are_checked(tmp_path, monkeypatch, distribution):
    """The others would wait for a process that left before."""

    def start(*_):
        raise JoinedError

    monkeypatch.setattr(engines, "choose_backend", lambda: "tensorflow")
    monkeypatch.setattr(cluster, "start", start)
    config = PretrainingConfig(
        input_file=str(tmp_path / "missing"), output_dir=str(tmp_path / "run"), distribution=distribution
    )
    with pytest.raises(JoinedError if distribution == "multi_worker" else InputError):
        cli.pretrain(config)
