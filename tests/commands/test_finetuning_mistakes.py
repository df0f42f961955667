"""Mistakes in calling the fine-tuning commands, told by files and model: one line, and nothing is begun.

Those of vocabularies and settings have tests in `tests/runs`.
"""

import pytest
import recorded_calls
from exports import run_export
from task_files import TASKS, finetune, flags_of, write_tasks

MISTAKES = [
    ("squad", {"init_checkpoint": ""}, "`bert_config_file` must be given without `init_checkpoint`"),
    ("squad", {"max_seq_length": 65}, "`max_seq_length` must be at most max_position_embeddings=64 of the"),
    ("squad", {"init_checkpoint": "{files}/bert-bare"}, "where no vocab.txt is beside `init_checkpoint`"),
    ("glue", {"task_name": "XNLI"}, "XNLI"),
    ("glue", {"task_name": "all", "data_dir": "{tmp}"}, "`data_dir` must hold a task's folder, such as CoLA"),
    ("glue", {"task_name": "MNLI"}, "dev_matched.tsv must exist"),
    ("glue", {"do_predict": "true"}, "test.tsv must exist"),
    ("ner", {"train_file": "{tmp}/bare.txt"}, "bare.txt must have a tag in its last column. Received: one"),
    ("glue", {"init_checkpoint": "{tuned}/run", "vocab_file": "{files}/other.json"}, "must be the one that"),
    (
        "glue",
        {"init_checkpoint": "{tuned}/hf", "vocab_file": "{files}/other.json"},
        "must have the tokens of {tuned}",
    ),
    (
        "glue",
        {"init_checkpoint": "", "bert_config_file": "bert-tiny", "vocab_file": "{files}/other.json"},
        "must have one WordPiece a line for a BERT",
    ),
    ("glue", {"init_checkpoint": "{files}/modernbert-bare"}, "where no vocab.txt or tokenizer.json is"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    """A run of a ModernBERT, for which no step is needed, and its export."""
    folder = tmp_path_factory.mktemp("tuned")
    assert finetune("glue", files, folder / "run", "modernbert", num_train_epochs=0.1).status == 0
    assert run_export(init_checkpoint=folder / "run", output_dir=folder / "hf", format="hf") == 0
    return folder


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("task", "changes", "message"), MISTAKES)
def test_a_mistake_is_one_line(files, tuned, tmp_path, task, changes, message):
    (tmp_path / "bare.txt").write_text("word\n")
    places = {"files": files, "tuned": tuned, "tmp": tmp_path}
    changes = {name: str(value).format(**places) for name, value in changes.items()}
    flags = flags_of(task, files, tmp_path / "run", **changes)
    recorded_calls.assert_refused(*TASKS[task], message.format(**places), **flags)
    assert not list(tmp_path.glob("run/checkpoint-*"))
