"""A command that misses an input says so before TensorFlow is imported."""

import subprocess
import sys

import pytest

from bert_packed import cli
from bert_packed.checkpoints.starting_weights import check_exists
from bert_packed.core.settings import InputError
from bert_packed.parallel import cluster
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training import engines

PROGRAM = """
import sys
from bert_packed.cli import run_command
status = run_command({command!r}, ["x", *{flags!r}])
assert "tensorflow" not in sys.modules
sys.exit(status)
"""


RUN = {"input_file": "there", "output_dir": "out"}
MISTAKES = [
    *(
        ("pretrain", {**RUN, name: "missing"}, f"`{name}` must match at least one file. ", "'missing'")
        for name in ("input_file", "eval_input_file", "unpacked_input_file")
    ),
    *(
        (
            name,
            {"init_checkpoint": "missing", **more},
            "`init_checkpoint` must be a folder, or the prefix of a TensorFlow checkpoint",
            "missing",
        )
        for name, more in (("export", {"output_dir": "out"}), ("audit", {"input_file": "there"}))
    ),
    (
        "glue",
        {"task_name": "RTE", "data_dir": "missing", "output_dir": "out", "init_checkpoint": "x"},
        "`data_dir` must be an existing folder. ",
        "missing",
    ),
]


@pytest.mark.parametrize(("command", "flags", "rule", "received"), MISTAKES)
def test_a_missing_input_is_told_without_tensorflow(tmp_path, command, flags, rule, received):
    (tmp_path / "there").write_bytes(b"x")
    argv = [f"--{name}={value}" for name, value in flags.items()]
    program = PROGRAM.format(command=command, flags=argv)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert rule in ended.stderr and f"Received: {received}." in ended.stderr
    assert not (tmp_path / "out").exists()


class JoinedError(Exception):
    """This process has met the others of its cluster."""


@pytest.mark.parametrize("distribution", cluster.DISTRIBUTIONS)
def test_in_a_cluster_the_others_are_met_before_inputs_are_looked_for(tmp_path, monkeypatch, distribution):
    """A process that left before would be waited for by the others."""

    def start(*_):
        raise JoinedError

    monkeypatch.setattr(engines, "choose_backend", lambda: "tensorflow")
    monkeypatch.setattr(cluster, "start", start)
    config = PretrainingConfig(
        input_file=str(tmp_path / "missing"), output_dir=str(tmp_path / "run"), distribution=distribution
    )
    with pytest.raises(JoinedError if distribution == "multi_worker" else InputError):
        cli.pretrain(config)


def test_a_prefix_and_a_folder_are_there(tmp_path):
    (tmp_path / "bert_model.ckpt.index").touch()
    for path in (tmp_path, tmp_path / "bert_model.ckpt", ""):
        check_exists(str(path))
    with pytest.raises(InputError, match=r"Received: .*bert_model"):
        check_exists(str(tmp_path / "bert_model"))
