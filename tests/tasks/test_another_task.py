"""A task of this test's, one folder and one row, has command, help, training, resume, scores and export.

It alone fails where the package knows its tasks by name outside the table.
"""

import importlib
import json

import pytest
from encoder_files import TEXTS, write_encoder
from exports import run_export
from parity_task.config import ParityConfig

import bert_packed
from bert_packed import cli
from bert_packed.tasks.registry import TASKS, Task


@pytest.fixture
def commands(monkeypatch):
    """The row, and the table of commands that is made of it."""
    monkeypatch.setitem(TASKS, "parity", Task("texts by number of words", "parity_task", "ParityConfig"))
    yield importlib.reload(cli).COMMANDS
    monkeypatch.undo()
    importlib.reload(cli)


@pytest.mark.usefixtures("uncompiled")
def test_a_task_is_a_folder_and_a_row(commands, tmp_path, capsys):
    write_encoder(tmp_path / "start")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    flags = {
        "text_file": tmp_path / "texts.txt",
        "init_checkpoint": tmp_path / "start",
        "output_dir": tmp_path / "run",
        "max_seq_length": 24,
        "train_batch_size": 4,
        "num_train_epochs": 3.0,
        "log_steps": 1,
    }
    argv = ["bert-packed parity", *(f"--{name}={value}" for name, value in flags.items())]
    assert "parity" in commands and "  parity      texts by number of words\n" in cli.usage()
    assert cli.run_command("parity", ["x", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Learns whether the texts of a file")
    assert cli.run_command("parity", [*argv, "--text_file=missing"]) == 2
    assert "`text_file` must be an existing file. Received: missing." in capsys.readouterr().err
    assert cli.run_command("parity", argv) == 0
    scores = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert 0 <= scores["accuracy"] <= 1
    capsys.readouterr()
    # The same settings from Python: the run is complete, and is scored again
    config = ParityConfig(
        **{name: str(value) if "/" in str(value) else value for name, value in flags.items()}
    )
    result = bert_packed.finetune(config)
    assert result.scores == scores and "checkpoint-6" in capsys.readouterr().out
    assert run_export(init_checkpoint=tmp_path / "run", output_dir=tmp_path / "hf") == 0
    content = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert content["architectures"] == ["BertForSequenceClassification"]
