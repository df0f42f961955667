"""A pre-training by epochs reads every pack, and continues bit for bit."""

import json
import shutil

import numpy as np
import pytest
from pretraining_command import arguments, read_rows, run, write_all
from safetensors.numpy import load_file

pytestmark = pytest.mark.usefixtures("uncompiled_file")
FLAGS = {"eval_input_file": "", "eval_steps": 0, "save_checkpoints_steps": 3, "log_steps": 1}


def command(data, folder, **changes):
    given = arguments(data, folder, **FLAGS, **changes)
    return [argument for argument in given if not argument.startswith("--num_train_steps")]


@pytest.mark.slow
def test_a_run_by_epochs(tmp_path, capsys):
    data = write_all(tmp_path)
    by_epochs = {"num_train_epochs": 2}
    assert run(*command(data, tmp_path / "run", **by_epochs)) == 0
    # 15 packs twice, 4 in a step
    flags = json.loads((tmp_path / "run" / "run.json").read_text())["flags"]
    assert (flags["num_train_steps"], flags["num_train_epochs"]) == (8, 0)
    part = shutil.copytree(tmp_path / "run", tmp_path / "part")
    shutil.rmtree(part / "checkpoint-8")
    shutil.rmtree(part / "checkpoint-6")
    capsys.readouterr()
    # Either way of giving the steps is the same run
    for again in (command(data, part, **by_epochs), arguments(data, part, **FLAGS, num_train_steps=8)):
        assert run(*again) == 0
    assert f"continues from {part}/checkpoint-3" in capsys.readouterr().out
    assert read_rows(part / "metrics.csv") == read_rows(tmp_path / "run" / "metrics.csv")
    got, want = (
        load_file(folder / "checkpoint-8" / "model.safetensors") for folder in (part, tmp_path / "run")
    )
    assert all(np.array_equal(got[name], values) for name, values in want.items())
    assert run(*arguments(data, part, **FLAGS, **by_epochs)) == 2
    error = capsys.readouterr().err
    assert "`num_train_steps` must be left out with num_train_epochs. Received: 24." in error
    assert error.count("\n") == 1
