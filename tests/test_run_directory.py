"""When a run may start or continue: same flags, same bytes, an own directory, one process."""

import contextlib
import dataclasses
import shutil

import pytest
from tiny import write_data

from bert_packed.config import TrainConfig
from bert_packed.run_directory import describe_inputs, locked, open_run
from data_gen.command_line import write_json
from data_gen.settings import InputError


@pytest.fixture
def files(tmp_path):
    (tmp_path / "data").mkdir()
    return write_data(tmp_path / "data")


@pytest.fixture
def started(tmp_path, files):
    """A run with a checkpoint: its folder, config and inputs."""
    config = TrainConfig(input_file="data/*", output_dir=str(tmp_path / "run"))
    inputs = {"input_file": describe_inputs(files), "eval_input_file": []}
    with locked(config.output_dir) as folder:
        assert open_run(folder, config, inputs) is None
        (folder / "checkpoint-1").mkdir()
    return folder, config, inputs


def test_same_run_continues_from_its_newest_checkpoint(started):
    folder, config, inputs = started
    for step in (2, 10):
        (folder / f"checkpoint-{step}").mkdir()
    assert open_run(folder, config, inputs) == folder / "checkpoint-10"
    assert "--train_batch_size=32\n" in (folder / "resolved.flags").read_text()


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 0.5), ("train_batch_size", 7), ("mlm_loss", "per_token")]
)
def test_other_flags_are_refused_by_name(started, name, value):
    folder, config, inputs = started
    with pytest.raises(InputError, match=f"`{name}` must be as in the run") as caught:
        open_run(folder, dataclasses.replace(config, **{name: value}), inputs)
    assert str(caught.value).endswith(f"Received: {value!r}.")


def test_flags_that_change_no_result_may_change(started):
    folder, config, inputs = started
    open_run(folder, dataclasses.replace(config, keep_checkpoint_max=9), inputs)


def test_changed_added_and_removed_inputs_are_named(started, files):
    folder, config, inputs = started
    changed = [dict(entry) for entry in inputs["input_file"]]
    changed[1]["sha256"] = "0"
    added = [*inputs["input_file"], {"path": "more", "sha256": "1", "num_records": 1}]
    for entries, path in ((changed, files[1]), (added, "more"), (inputs["input_file"][:1], files[1])):
        with pytest.raises(InputError, match="`input_file` must match the same files") as caught:
            open_run(folder, config, {**inputs, "input_file": entries})
        assert path in str(caught.value)


def test_a_start_without_a_checkpoint_may_change_its_flags(started):
    folder, config, inputs = started
    (folder / "checkpoint-1").rmdir()
    (folder / "metrics.csv").write_text("step\n")
    corrected = dataclasses.replace(config, learning_rate=0.5)
    assert open_run(folder, corrected, inputs) is None
    assert not (folder / "metrics.csv").exists()
    (folder / "checkpoint-1").mkdir()
    with pytest.raises(InputError, match="`learning_rate` must be as in the run"):
        open_run(folder, config, inputs)


def test_someone_elses_directory_is_refused_and_kept(started):
    folder, config, inputs = started
    (folder / "thesis.txt").write_text("mine")
    (folder / "run.json").unlink()
    for overwrite in (False, True):
        with pytest.raises(InputError, match="must be empty or hold this run"):
            open_run(folder, dataclasses.replace(config, overwrite=overwrite), inputs)
    assert (folder / "thesis.txt").read_text() == "mine"


def test_overwrite_starts_anew(started):
    folder, config, inputs = started
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-20.partial").mkdir()
    (folder / "metrics.csv").write_text("step\n")
    assert open_run(folder, dataclasses.replace(config, overwrite=True, learning_rate=1.0), inputs) is None
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "resolved.flags", "run.json"]


def test_one_run_at_a_time(tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(tmp_path / "run"))
        with pytest.raises(InputError, match="must not be used by another run"):
            stack.enter_context(locked(tmp_path / "run"))


def test_counts_come_from_a_manifest_that_fits(files):
    plain = describe_inputs(files)
    assert [entry["num_records"] for entry in plain] == [9, 6]
    folder = files[0].rpartition("/")[0]
    listed = [
        {"name": entry["path"].rpartition("/")[2], "sha256": entry["sha256"], "num_records": 70 + i}
        for i, entry in enumerate(plain)
    ]
    write_json(f"{folder}/manifest.json", {"kind": "packed", "files": listed})
    assert [entry["num_records"] for entry in describe_inputs(files)] == [70, 71]
    shutil.copy(files[0], files[1])
    with pytest.raises(InputError, match=r"must be the file that its manifest\.json lists"):
        describe_inputs(files)
