"""Start and continuation of a run: equal flags, facts and bytes, an empty or own directory, a lock."""

import dataclasses
import json

import pytest
from tiny import write_data

from bert_packed.core import hub
from bert_packed.core.settings import InputError
from bert_packed.parallel.targets import Target
from bert_packed.runs import run_directory
from bert_packed.runs.exports import read_origin
from bert_packed.runs.input_files import describe_inputs
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.run_directory import (
    agree,
    describe_continuation,
    find_checkpoint,
    locked,
    naming_last_checkpoint,
    record_segment,
    remove_partial,
    start_run,
)
from bert_packed.training.nonfinite import NotFiniteError


@pytest.fixture
def files(tmp_path):
    (tmp_path / "data").mkdir()
    return write_data(tmp_path / "data")


@pytest.fixture
def started(tmp_path, files):
    """A run with a checkpoint: its folder, config and facts."""
    config = PretrainingConfig(input_file="data/*", output_dir=str(tmp_path / "run"), dtype="float32")
    facts = {
        "inputs": {"input_file": describe_inputs(files), "eval_input_file": []},
        "model": {"hidden_size": 8, "hidden_act": "gelu"},
        "data": {"packing_factor": 2.0, "vocabularies": ["1"]},
    }
    with locked(config.output_dir) as folder:
        assert find_checkpoint(folder, config, facts) is None
        start_run(folder, config, facts)
        (folder / "checkpoint-1").mkdir()
    return folder, config, facts


def changed(config, **flags):
    return dataclasses.replace(config, **flags)


def record_flags(folder, **flags):
    """Write flags into a `run.json`; None leaves out one that an earlier version did not know."""
    run = json.loads((folder / "run.json").read_text())
    run["flags"] = {name: value for name, value in (run["flags"] | flags).items() if value is not None}
    (folder / "run.json").write_text(json.dumps(run))


def assert_refused(message, function, *arguments):
    with pytest.raises(InputError, match=message):
        function(*arguments)


def lock(folder, *processes):
    with locked(folder, *processes) as seen:
        return seen


def test_same_run_continues_from_its_newest_checkpoint(started):
    folder, config, facts = started
    for step in (2, 10):
        (folder / f"checkpoint-{step}").mkdir()
    (folder / "checkpoint-20.partial").mkdir()
    assert find_checkpoint(folder, config, facts) == folder / "checkpoint-10"
    remove_partial(folder)
    assert not (folder / "checkpoint-20.partial").exists()
    flags = (folder / "resolved.flags").read_text()
    assert "--train_batch_size=32\n" in flags and "overwrite" not in flags


@pytest.mark.parametrize(
    ("flags", "change", "named"),
    [
        ({"learning_rate": 0.5}, {}, "learning_rate 0.001 -> 0.5"),
        ({"mlm_loss": "per_token"}, {}, "mlm_loss 'per_sequence' -> 'per_token'"),
        ({"remat": True}, {}, "remat False -> True"),  # the run is older than the flag
        ({}, {"model": {"hidden_size": 8, "hidden_act": "relu"}}, "hidden_act of the model 'gelu' -> 'relu'"),
        ({}, {"data": {"packing_factor": 1.5}}, "packing_factor of the data 2.0 -> 1.5"),
        ({}, {"inputs": lambda a, b: [a, {**b, "sha256": "0"}]}, "packed-1.tfrecord changed"),
        ({}, {"inputs": lambda a, b: [a, b, {"path": "more", "sha256": "1"}]}, "input_file more"),
        ({}, {"inputs": lambda a, _: [a]}, "packed-1.tfrecord"),
        # These change no result, and a flag and a fact are newer than the run
        ({"keep_checkpoint_max": 9, "save_checkpoints_steps": 7, "output_dir": "elsewhere"}, {}, None),
        ({}, {"data": {"packing_factor": 2.0, "vocabularies": ["1"], "longest_sequence": 8}}, None),
    ],
)
def test_a_run_continues_as_it_was(started, flags, change, named):
    folder, config, facts = started
    record_flags(folder, remat=None)
    if "inputs" in change:
        change = {"inputs": {"input_file": change["inputs"](*facts["inputs"]["input_file"])}}
    given = folder, changed(config, **flags), {**facts, **change}
    if named:
        assert_refused(f"a run must continue as it was.*{named}", find_checkpoint, *given)
    else:
        assert find_checkpoint(*given) == folder / "checkpoint-1"


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [("summa", "gather", "ring"), ("peak_flops", 0.0, 2e12), ("recipe", "", "devlin-base")],
)
def test_a_removed_flag_may_have_its_default_alone(started, name, default, other):
    folder, config, facts = started
    record_flags(folder, **{name: default})
    assert find_checkpoint(folder, config, facts)
    record_flags(folder, **{name: other})
    message = rf"`{name}`, which is gone.* {default!r}, .*Received: {other!r}, in .*run.json\.$"
    assert_refused(message, find_checkpoint, folder, config, facts)
    assert find_checkpoint(folder, changed(config, overwrite=True), facts) is None


def test_a_start_without_a_checkpoint_may_change_its_flags(started):
    folder, config, facts = started
    (folder / "checkpoint-1").rmdir()
    (folder / "metrics.csv").write_text("step\n")
    corrected = changed(config, learning_rate=0.5)
    assert find_checkpoint(folder, corrected, facts) is None
    start_run(folder, corrected, facts)
    assert not (folder / "metrics.csv").exists()
    (folder / "checkpoint-1").mkdir()
    assert_refused(r"learning_rate 0\.5 -> 0\.001", find_checkpoint, folder, config, facts)


def test_a_directory_must_be_a_folder_of_this_machine(tmp_path, monkeypatch):
    """A URL would become a local folder of that name, and a file behind a link would be emptied."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("content of another program, of more than 32 bytes")
    assert_refused("must be a local folder", lock, "gs://bucket/run")
    assert_refused("which is a file", lock, "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "file")
    assert_refused(r"must not be a link\. Received: .*/run/\.lock", lock, tmp_path / "run")
    assert (tmp_path / "file").read_text() == "content of another program, of more than 32 bytes"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("is_run", "other"), [(True, "thesis.txt"), (False, "thesis.txt"), (False, "checkpoint-500")]
)
def test_other_peoples_files_are_refused_and_kept(started, overwrite, is_run, other):
    folder, config, facts = started
    (folder / other).mkdir() if other.startswith("checkpoint") else (folder / other).touch()
    (folder / "tensorboard").mkdir()
    if not is_run:
        (folder / "run.json").unlink()
    before = sorted(folder.rglob("*"))
    message = rf"must be empty or hold this run\. Received: .* {other}"
    assert_refused(message, find_checkpoint, folder, changed(config, overwrite=overwrite), facts)
    assert sorted(folder.rglob("*")) == before


def test_overwrite_starts_from_the_beginning(started):
    folder, config, facts = started
    for name in ("checkpoint-20.partial", "export-7", "export-9.partial", "export-9.replaced.partial"):
        (folder / name).mkdir()
    (folder / "metrics.csv").write_text("step\n")
    other = changed(config, overwrite=True, learning_rate=1.0)
    assert find_checkpoint(folder, other, facts) is None
    assert (folder / "checkpoint-1").exists()  # until the new run is known to start
    start_run(folder, other, facts)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "resolved.flags", "run.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b'{"flags": ', "must be JSON"),
        (b'{"flags": "\xff"}', "must be UTF-8"),
        (b"[]", "must hold a JSON object. Received: list"),
        (b"{}", "`flags` must be an object. Received: None"),
        ({"flags": []}, r"`flags` must be an object. Received: \[\]"),
        ({"model": None}, "`model` must be an object. Received: None"),
        ({"data": "x"}, "`data` must be an object. Received: 'x'"),
        ({"flags": {"num_train_steps": "ten"}}, "`num_train_steps` must be a whole number. Received: 'ten'"),
        ({"flags": {"train_batch_size": 1.5}}, "`train_batch_size` must be a whole number. Received: 1.5"),
        ({"data": {"packing_factor": "2"}}, "`packing_factor` must be a number. Received: '2'"),
        ({"inputs": {"input_file": "x"}}, "`inputs` must be lists of objects with path and sha256"),
        ({"inputs": {"input_file": [{"path": "x"}]}}, "`inputs` must be lists of objects with path and sha2"),
        ({"segments": {}}, "`segments` must be a list of objects with backend"),
        ({"segments": [{"first_step": 0}]}, "`segments` must be a list of objects with backend"),
        ({"segments": ["jax"]}, "`segments` must be a list of objects with backend"),
    ],
)
def test_damaged_record_of_a_run(started, damage, message):
    """Each reader says so in one line, and no byte changes."""
    folder, config, facts = started
    path = folder / "run.json"
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(path.read_text()), **damage}).encode()
    path.write_bytes(damage)
    for read in (
        lambda: find_checkpoint(folder, config, facts),
        lambda: run_directory.as_begun(changed(config, dtype="auto")),
        lambda: describe_continuation(folder, "checkpoint-1"),
        lambda: record_segment(folder, 1, "jax"),
        lambda: read_origin(folder),
    ):
        with pytest.raises(InputError, match=rf"^{path}\b.* {message}") as caught:
            read()
        assert "\n" not in str(caught.value) and path.read_bytes() == damage


class Second:
    """A process that is told what the first decided."""

    index, is_first = 1, False

    def __init__(self, *decisions):
        self._decisions = list(decisions)

    def first_decides(self, _):
        return self._decisions.pop(0)


def test_a_directory_is_of_one_run_and_of_all_its_processes(tmp_path):
    with locked(tmp_path / "run") as folder:
        assert_refused("must not be used by another run", lock, folder)
        word = (folder / ".lock").read_text()
        assert lock(folder, Second(word)) == folder
        for other in (tmp_path / "other", folder):
            assert_refused(r"one directory that all .*process 1 does not see", lock, other, Second("another"))
    assert not (tmp_path / "other").exists()
    with locked(folder):
        assert (folder / ".lock").read_text() not in ("", word)


def test_all_processes_of_a_run_must_be_given_the_same(started):
    folder, config, facts = started
    first = json.loads(json.dumps({"flags": dataclasses.asdict(config), **facts}))
    assert agree(folder, config, facts, print, Second(first, "checkpoint-1")) == folder / "checkpoint-1"
    assert agree(folder, config, facts, print, Second(first, None)) is None
    other = changed(config, epsilon=0.1)
    message = r"must be given the same\. Received: epsilon 1e-06 -> 0\.1; proc"
    assert_refused(message, agree, folder, other, facts, print, Second(first))
    # It is looked for, not only listed
    assert_refused("must have a whole checkpoint", agree, folder, config, facts, print)


def test_every_part_of_a_run_is_on_record(started, monkeypatch):
    folder, _, _ = started
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    line = "continues from checkpoint-1"
    assert describe_continuation(folder, "checkpoint-1") == line  # of a version that recorded no segments
    record_segment(folder, 0, "tensorflow")
    assert describe_continuation(folder, "checkpoint-1") == line
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    other = "\nxla        XLA_FLAGS were '' before, '--a=1' now: results may differ in the last digits"
    assert describe_continuation(folder, "checkpoint-1") == line + other
    record_segment(folder, 70, "jax", peak_flops=2.0)
    assert describe_continuation(folder, "checkpoint-1") == line  # it is the last segment that counts
    record = json.loads((folder / "run.json").read_text())
    assert record["segments"] == [
        {"first_step": 0, "backend": "tensorflow", "xla_flags": ""},
        {"first_step": 70, "backend": "jax", "peak_flops": 2.0, "xla_flags": "--a=1"},
    ]
    assert record["model"] == {"hidden_size": 8, "hidden_act": "gelu"}


def test_divergence_names_the_last_good_checkpoint(started):
    folder, _, _ = started
    for step in (9, 10):
        (folder / f"checkpoint-{step}").mkdir()

    def fail(error):
        with naming_last_checkpoint(folder):
            raise error

    diverged = NotFiniteError("Received: loss nan at step 11.")
    assert_refused(r"Received: loss nan.* start from .*checkpoint-10, the last good", fail, diverged)
    assert_refused(r"start from .*checkpoint-9, the last", fail, NotFiniteError("in evaluation.", 10))
    assert_refused("^no such record$", fail, InputError("no such record"))
    for step in (1, 9, 10):
        (folder / f"checkpoint-{step}").rmdir()
    assert_refused("To go on, start in a new", fail, diverged)


def test_a_start_of_the_hub_is_a_name_and_a_commit(started, monkeypatch):
    """Its folder differs between caches; the commit is asked for again, unless it is overwritten."""
    _, config, facts = started
    commits = "1" * 40, "2" * 40
    old, moved, new = (
        f"/{cache}/hub/models--owner--a-model/snapshots/{commit}"
        for cache, commit in (("one", commits[0]), ("two", commits[0]), ("one", commits[1]))
    )
    first, same, other = (changed(config, init_checkpoint=path) for path in (old, moved, new))
    with locked(config.output_dir) as folder:
        start_run(folder, first, facts)
        (folder / "checkpoint-1").mkdir()
    begun = f"owner/a-model@{commits[0]}"
    assert f"--init_checkpoint={begun}\n" in (folder / "resolved.flags").read_text()
    assert find_checkpoint(folder, same, facts) == folder / "checkpoint-1"
    message = f"init_checkpoint '{begun}' -> 'owner/a-model@{commits[1]}'"
    assert_refused(message, find_checkpoint, folder, other, facts)

    def local(config, may_be_gone=False):
        return hub.with_local_start(config, run_directory.begun_flags(config), may_be_gone)

    monkeypatch.setattr(hub, "find_model", lambda *asked: " ".join(asked))
    named = changed(config, init_checkpoint="owner/a-model")
    assert local(named).init_checkpoint == f"owner/a-model {begun}"
    again = changed(named, overwrite=True)
    assert local(again).init_checkpoint == "owner/a-model "

    def lost(name, begun):
        raise InputError("the hub is down")

    monkeypatch.setattr(hub, "find_model", lost)
    assert local(named, True).init_checkpoint == begun
    other = changed(named, init_checkpoint="owner/other")
    for config, may_be_gone in ((named, False), (again, True), (other, True)):
        assert_refused("the hub is down", local, config, may_be_gone)


def test_the_micro_batch_is_that_of_the_start(started):
    folder, config, _ = started
    record_flags(folder, micro_batch_size=8)
    for flags, size in (
        ({}, 8),
        ({"micro_batch_size": 4}, 4),
        ({"train_batch_size": 30}, 0),
        ({"overwrite": True}, 0),
    ):
        assert run_directory.as_begun(changed(config, **flags)).micro_batch_size == size


def test_dtype_is_that_of_the_start_or_of_the_devices(started, monkeypatch, tmp_path):
    folder, config, _ = started
    auto = changed(config, dtype="auto")
    elsewhere = changed(auto, output_dir=str(tmp_path / "new"))
    for platform, others in (("cpu", "float32"), ("tpu", "mixed_bfloat16"), ("gpu", "mixed_bfloat16")):
        monkeypatch.setattr(run_directory, "devices_here", lambda found=platform: Target(found))
        assert run_directory.as_begun(auto).dtype == "float32"  # as it began
        assert run_directory.as_begun(elsewhere).dtype == others
        assert run_directory.as_begun(changed(auto, overwrite=True)).dtype == others
    given = changed(config, dtype="mixed_bfloat16")
    assert run_directory.as_begun(given) == given
    (folder / "checkpoint-1").rmdir()  # a start that failed decides nothing
    assert run_directory.as_begun(auto).dtype == "mixed_bfloat16"
    (tmp_path / "new").write_text("")
    assert_refused("`output_dir` must be a directory", run_directory.as_begun, elsewhere)
    # All processes ask, whatever their flags, or the answers of the first would be one off
    for dtype, expected in (("auto", "float32"), ("mixed_bfloat16", "mixed_bfloat16")):
        one = changed(config, dtype=dtype)
        assert run_directory.as_begun(one, Second(["float32", 0])).dtype == expected
