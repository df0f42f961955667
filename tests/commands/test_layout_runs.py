"""The training command under layouts: one run on any mesh, continued on another; mistakes in one line."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from cluster import RunningCluster
from layouts import make_devices, needs_jax
from pretraining_command import arguments, assert_refused, assert_same_run, flags_of, pretrain, write_all
from safetensors.numpy import load_file
from tiny import CONFIG

from bert_packed.training.metrics_log import read_rows

pytestmark = needs_jax
NUM_STEPS, FIRST_SAVE = 8, 4
SETTINGS = {
    "train_batch_size": 8,
    "micro_batch_size": 4,
    "eval_batch_size": 4,
    "num_train_steps": NUM_STEPS,
    "save_checkpoints_steps": FIRST_SAVE,
    "eval_steps": FIRST_SAVE,
    "log_steps": 2,
}
OPTIMUS = {"layout": "optimus2d", "mesh": "2,2"}
MEGATRON = {"layout": "megatron1d", "mesh": "2,1,2"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    make_devices()
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run on one device, and one on four: folders; and beside each what it printed."""
    folders = {}
    for name, changes in (("one", {}), ("optimus", OPTIMUS)):
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        seen = pretrain(**flags_of(data, folders[name], **SETTINGS, **changes))
        assert seen.status == 0, seen.error
        (folders[name].parent / "said").write_text(seen.out)
    return folders


def read(folder, step=NUM_STEPS):
    return {
        name: load_file(folder / f"checkpoint-{step}" / f"{name}.safetensors")
        for name in ("model", "training")
    }


def assert_close(one, other):
    for name, want in one["model"].items():
        assert other["model"][name].shape == want.shape
        if not name.endswith("key/bias"):
            # One weight of 256 differs by 1.1e-5 on a processor with AMX, none by 1e-5 elsewhere
            np.testing.assert_allclose(other["model"][name], want, atol=2e-5, rtol=0, err_msg=name)
    for name, want in one["training"].items():
        found = other["training"][name]
        if "momentum" in name and "key_bias" not in name:
            # If a step's gradients nearly cancel, as a bias's, little is left beside rounding
            assert np.abs(found - want).max() <= 1e-4 * np.abs(want).max(), name


def test_checkpoints_are_those_of_one_device(whole):
    one, optimus = read(whole["one"]), read(whole["optimus"])
    assert all(one[name].keys() == optimus[name].keys() for name in one)
    assert one["model"]["bert/embeddings/word_embeddings"].shape == (CONFIG.vocab_size, CONFIG.hidden_size)
    assert_close(one, optimus)
    assert "layout" not in (whole["one"].parent / "said").read_text()
    said = (whole["optimus"].parent / "said").read_text()
    assert "layout     optimus2d: 1 x 2 x 2 devices" in said
    assert "the vocabulary is padded from 31 to 32 tokens" in said


@pytest.mark.parametrize(
    ("begun", "changes"),
    [("optimus", OPTIMUS), ("optimus", MEGATRON), ("optimus", {}), ("one", OPTIMUS)],
    ids=["the same mesh", "another layout", "one device", "from one device"],
)
def test_any_mesh_continues(whole, data, tmp_path, begun, changes):
    """On the same mesh a run continues bit for bit."""
    folder = shutil.copytree(whole[begun], tmp_path / "run")
    shutil.rmtree(folder / f"checkpoint-{NUM_STEPS}")
    seen = pretrain(**flags_of(data, folder, **SETTINGS, **changes))
    assert seen.status == 0, seen.error
    assert ("layout     " in seen.out) == bool(changes)
    assert changes != MEGATRON or "layout     megatron1d: 2 x 1 x 2 devices" in seen.out
    if (begun, changes) == ("optimus", OPTIMUS):
        assert_same_run(folder, whole[begun])
    else:
        assert_close(read(whole["one"]), read(folder))


def test_weights_of_others_start_a_run_on_a_mesh(whole, data, tmp_path):
    """At a learning rate of 0 the start's weights are saved, without what the mesh adds."""
    settings = {**SETTINGS, **OPTIMUS, "learning_rate": 0, "num_train_steps": 1, "save_checkpoints_steps": 1}
    assert pretrain(**flags_of(data, tmp_path / "run", **settings, init_checkpoint=whole["one"])).status == 0
    for name, want in read(whole["one"])["model"].items():
        np.testing.assert_array_equal(read(tmp_path / "run", 1)["model"][name], want, err_msg=name)


SIX = {"micro_batch_size": 0, "train_batch_size": 6, "eval_batch_size": 3}
BY_SIDE = "must be divisible by the side of the mesh for optimus2d. Received: "
MISTAKES = [
    ({**OPTIMUS, "mesh": "2,1"}, "as many rows as columns for optimus2d. Received: 2 rows, 1 columns."),
    ({**OPTIMUS, "mesh": "5,5"}, "1x5x5 = 25 devices, where there are 16. To try it on a CPU:"),
    ({**OPTIMUS, "micro_batch_size": 1}, "rows of the mesh, 1 x 2. Received: 1 packs."),
    ({**OPTIMUS, "mesh": "2,2,2", "eval_batch_size": 6}, "rows of the mesh, 2 x 2. Received: 6 packs."),
    ({**OPTIMUS, "mesh": "3,3", **SIX}, f"`hidden_size` {BY_SIDE}hidden_size=16, a side of 3."),
    ({**OPTIMUS, "mesh": "4,4"}, f"`num_attention_heads` {BY_SIDE}num_attention_heads=2, a side of 4."),
    ({**MEGATRON, "mesh": "2,2"}, "`num_attention_heads` must be divisible by the devices of a copy for"),
    (
        {**OPTIMUS, "bert_config_file": "{odd}"},
        f"`intermediate_size` {BY_SIDE}intermediate_size=33, a side of 2.",
    ),
    ({**MEGATRON, "mesh": "4,1,2", "micro_batch_size": 2}, "the copies of the model, 4. Received: 2 packs."),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_one_line(data, tmp_path, changes, message):
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(CONFIG, intermediate_size=33))))
    changes = {name: str(value).format(odd=odd) for name, value in changes.items()}
    assert_refused(message, **flags_of(data, tmp_path / "run", **{**SETTINGS, **changes}))
    assert not list(tmp_path.rglob("checkpoint-*"))


PROCESSES = {  # number, devices of each, layout, and whether they continue the run of one device
    "a copy of the model each": (2, 4, {**OPTIMUS, "mesh": "2,2,2"}, False),
    "half of all matrices each": (2, 1, {**MEGATRON, "mesh": "1,2"}, False),
    "half a row each": (4, 1, OPTIMUS, True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("num", "devices", "changes", "continues"), PROCESSES.values(), ids=PROCESSES.keys())
def test_several_processes_take_the_steps_of_one_device(
    whole, data, tmp_path, monkeypatch, num, devices, changes, continues
):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    if continues:
        shutil.copytree(whole["one"], tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{NUM_STEPS}")
    command = arguments(data, tmp_path / "run", **SETTINGS, **changes, distribution="multi_worker")
    cluster = RunningCluster(tmp_path / "said", command, num, "jax")
    assert cluster.statuses() == [0] * num, cluster.said()
    assert_close(read(whole["one"]), read(tmp_path / "run"))
    for log in ("metrics.csv", "eval_metrics.csv"):
        want, found = (read_rows(folder / log) for folder in (whole["one"], tmp_path / "run"))
        assert [row["step"] for row in found] == [row["step"] for row in want]
        losses = [[float(row["loss"]) for row in rows] for rows in (found, want)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_step_on_a_mesh_is_compiled_only(data, tmp_path):
    changes = {"compile_only": tmp_path / "program", "eval_input_file": "", "eval_steps": 0}
    seen = pretrain(**flags_of(data, "", **{**SETTINGS, **OPTIMUS, **changes}))
    assert seen.status == 0 and "the vocabulary is padded from 31 to 32 tokens" in seen.out
    report = json.loads((tmp_path / "program" / "step.json").read_text())
    assert report["devices"] == 4
    assert {row["kind"] for row in report["collectives"]} >= {"all-gather", "reduce-scatter"}
