"""A command that misses an input says so before TensorFlow is imported."""

import subprocess
import sys

import pytest

import run_pretraining
from bert_packed.checkpoints.starting_weights import check_exists
from bert_packed.core.settings import InputError
from bert_packed.parallel import cluster
from bert_packed.runs.pretraining_config import TrainConfig

PROGRAM = """
import sys
from {module} import command
sys.argv[1:] = {flags!r}
status = command()
assert "tensorflow" not in sys.modules
sys.exit(status)
"""


@pytest.mark.parametrize("name", ["input_file", "eval_input_file", "unpacked_input_file"])
def test_a_missing_input_is_told_without_tensorflow(tmp_path, name):
    (tmp_path / "there.tfrecord").write_bytes(b"x")
    inputs = dict.fromkeys(("input_file", name), str(tmp_path / "there.tfrecord"))
    inputs[name] = str(tmp_path / "missing")
    flags = [f"--{flag}={path}" for flag, path in inputs.items()] + [f"--output_dir={tmp_path / 'run'}"]
    program = PROGRAM.format(module="run_pretraining", flags=flags)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert f"`{name}` must match at least one file. Received: {str(tmp_path / 'missing')!r}." in ended.stderr
    assert not (tmp_path / "run").exists()


class JoinedError(Exception):
    """This process has met the others of its cluster."""


@pytest.mark.parametrize("distribution", cluster.DISTRIBUTIONS)
def test_in_a_cluster_the_others_are_met_before_inputs_are_looked_for(tmp_path, monkeypatch, distribution):
    """A process that left before would be waited for by the others."""

    def start(*_):
        raise JoinedError

    monkeypatch.setattr(run_pretraining, "choose_backend", lambda: "tensorflow")
    monkeypatch.setattr(cluster, "start", start)
    config = TrainConfig(
        input_file=str(tmp_path / "missing"), output_dir=str(tmp_path / "run"), distribution=distribution
    )
    with pytest.raises(JoinedError if distribution == "multi_worker" else InputError):
        run_pretraining.main(config)


@pytest.mark.parametrize(("name", "more"), [("export", "--output_dir=out"), ("audit", "--input_file=x")])
def test_a_missing_checkpoint_is_told_without_tensorflow(tmp_path, name, more):
    (tmp_path / "x").write_bytes(b"x")
    flags = ["--init_checkpoint=missing", more]
    program = PROGRAM.format(module=f"bert_packed.{name}", flags=flags)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "`init_checkpoint` must be a folder, or the prefix of a TensorFlow checkpoint" in ended.stderr
    assert "Received: missing." in ended.stderr and not (tmp_path / "out").exists()


def test_a_missing_folder_of_glue_is_told_without_tensorflow(tmp_path):
    flags = ["--task_name=RTE", "--data_dir=missing", "--output_dir=out", "--init_checkpoint=x"]
    program = PROGRAM.format(module="bert_packed.finetune_glue", flags=flags)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "`data_dir` must be an existing folder. Received: missing." in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_prefix_and_a_folder_are_there(tmp_path):
    (tmp_path / "bert_model.ckpt.index").touch()
    for path in (tmp_path, tmp_path / "bert_model.ckpt", ""):
        check_exists(str(path))
    with pytest.raises(InputError, match=r"Received: .*bert_model"):
        check_exists(str(tmp_path / "bert_model"))
