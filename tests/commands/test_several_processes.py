"""The training command in several real processes: killed or frozen at any moment, the same commands go on.

Every moment is drawn from a seed: which process, which signal, at which step, how soon after. All twenty
take half an hour on two cores: `KILL_MOMENTS=20`. By default there are two, one of each backend.
"""

import os
import random
import signal
import time

import numpy as np
import pytest
from cluster import RunningCluster, last_step
from pretraining_command import arguments, assert_same_run, read_rows, write_all
from safetensors.numpy import load_file
from task_files import flags_of, write_tasks

from bert_packed.checkpoints.checkpoint import check_checkpoint
from bert_packed.parallel.processes import STATUS_LOST

pytestmark = pytest.mark.slow
NUM_STEPS = 40
MOMENTS = [
    *(("jax", 2, seed) for seed in range(9)),
    *(("jax", 4, seed) for seed in range(9, 13)),
    *(("tensorflow", 2, seed) for seed in range(13, 18)),
    *(("tensorflow", 4, seed) for seed in range(18, 20)),
]
NUM_MOMENTS = int(os.environ.get("KILL_MOMENTS", 2))
if len(MOMENTS) > NUM_MOMENTS:
    MOMENTS = [MOMENTS[index] for index in (2, 13, 12, 18)][:NUM_MOMENTS]
STOPPED = 128 + signal.SIGTERM


SETTINGS = {
    "train_batch_size": 8,
    "micro_batch_size": 4,
    "num_train_steps": NUM_STEPS,
    "save_checkpoints_steps": 3,
    "log_steps": 1,
    "eval_input_file": "",
    "eval_steps": 0,
    "distribution": "multi_worker",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def command_of(data, output_dir, **changes):
    return arguments(data, output_dir, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Function from backend and number of processes to a run that nothing befell, made at first use."""
    made = {}

    def find(backend, num):
        if (backend, num) not in made:
            folder = tmp_path_factory.mktemp("whole") / f"{backend}-{num}"
            distribution = "multi_worker" if num > 1 else "none"
            changes = {"save_checkpoints_steps": 1, "keep_checkpoint_max": NUM_STEPS}
            command = command_of(data, folder / "run", distribution=distribution, **changes)
            cluster = RunningCluster(folder / "said", command, num, backend)
            assert cluster.statuses() == [0] * num, cluster.said()
            assert [cluster.out(index).count("step 1/") for index in range(num)] == [1] + [0] * (num - 1)
            made[backend, num] = folder / "run"
        return made[backend, num]

    return find


def assert_lost(cluster, indices, seconds, is_of_first=False):
    """They end because another is lost: by our line, or, without the first, by JAX's service with its own."""
    found = cluster.wait_for_end(indices, seconds)
    assert set(found) <= {STATUS_LOST, *([-signal.SIGABRT] if is_of_first else [])}, cluster.said()
    for index, status in zip(indices, found, strict=True):
        said = "\n".join(cluster.err(index))
        lost = "the same commands continue from the last checkpoint"
        assert (lost if status == STATUS_LOST else "another task died") in said, cluster.said()


@pytest.mark.parametrize(("backend", "num", "seed"), MOMENTS)
def test_after_any_kill_the_same_commands_continue(data, uninterrupted, tmp_path, backend, num, seed):
    rng = random.Random(seed)
    victim = rng.randrange(num)
    number = rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    step, later = rng.randrange(NUM_STEPS - 15), 0.1 * rng.random()  # seconds: 40 steps take one
    command = command_of(data, tmp_path / "run")
    cluster = RunningCluster(tmp_path / "killed", command, num, backend)
    cluster.wait_for(lambda: last_step(tmp_path / "run") >= step)
    time.sleep(later)
    cluster.send(victim, number)
    if number != signal.SIGTERM:
        others = sorted(set(range(num)) - {victim})
        assert_lost(cluster, others, 30, victim == 0)
        if number == signal.SIGSTOP:  # and learns of it when it goes on
            cluster.send(victim, signal.SIGCONT)
            assert_lost(cluster, [victim], 60, is_of_first=True)
        else:
            assert cluster.statuses(60)[victim] == -signal.SIGKILL
    elif (statuses := cluster.statuses(60)) != [0] * num and -signal.SIGTERM not in statuses:
        assert statuses == [STOPPED] * num, cluster.said()
        newest = max(int(path.name[11:]) for path in (tmp_path / "run").glob("checkpoint-*[0-9]"))
        assert newest == last_step(tmp_path / "run")  # of the step that all have taken last
    for path in (tmp_path / "run").glob("checkpoint-*[0-9]"):
        check_checkpoint(path)
    again = RunningCluster(tmp_path / "again", command, num, backend)
    assert again.statuses() == [0] * num, again.said()
    assert_same_run(tmp_path / "run", uninterrupted(backend, num))


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_two_processes_take_the_steps_of_one(uninterrupted, backend):
    """Losses, gradients by the first step's moments, and weights after 20 steps with dropout."""
    folders = [uninterrupted(backend, num) for num in (1, 2)]
    for want, found in zip(*(read_rows(folder / "metrics.csv")[:20] for folder in folders), strict=True):
        for name in ("loss", "mlm_loss", "nsp_loss"):
            assert float(found[name]) == pytest.approx(float(want[name]), rel=1e-6)
    one, two = (load_file(folder / "checkpoint-1" / "training.safetensors") for folder in folders)
    names = [name for name in one if name.endswith("momentum")]
    largest = max(np.abs(one[name]).max() for name in names)
    assert largest > 0
    for name in names:
        np.testing.assert_allclose(two[name], one[name], atol=1e-6 * largest, rtol=0, err_msg=name)
    one, two = (load_file(folder / "checkpoint-20" / "model.safetensors") for folder in folders)
    for name in one:
        if not name.endswith("key/bias"):  # its gradient is 0: of rounding LAMB makes whole steps
            np.testing.assert_allclose(two[name], one[name], atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_fine_tuning_is_that_of_one_process_and_stops(tmp_path, backend):
    """The first process alone writes, predicts and speaks."""
    files = write_tasks(tmp_path)
    changes = {"num_train_epochs": 12, "save_checkpoints_steps": 50, "learning_rate": 0.001}
    changes |= {"eval_steps": 20, "keep_best": "true", "hidden_dropout_prob": 0.2}

    def start(name, folder, num):
        distribution = "multi_worker" if num > 1 else "none"
        flags = flags_of("ner", files, tmp_path / folder, **changes, distribution=distribution)
        command = [f"--{flag}={value}" for flag, value in flags.items()]
        return RunningCluster(tmp_path / name, command, num, backend, program=("-m", "bert_packed", "ner"))

    one, two = start("alone", "one", 1), start("said", "two", 2)
    # The run of one process may take longer, and the other must not be over before it is stopped
    two.wait_for(lambda: last_step(tmp_path / "two") >= 5)
    two.send(1, signal.SIGTERM)
    assert two.statuses() == [STOPPED] * 2, two.said()
    two = start("again", "two", 2)
    assert two.statuses() == [0, 0], two.said()
    assert one.statuses() == [0], one.said()
    assert "continues from" in two.out(0) and "batch" not in two.out(1)
    for log, name in (("metrics.csv", "loss"), ("eval_metrics.csv", "f1")):
        want, found = (
            [float(row[name]) for row in read_rows(tmp_path / folder / log)] for folder in ("one", "two")
        )
        assert found == pytest.approx(want, rel=1e-5) and len(found) > 2
    for name in ("predictions.txt", "eval_results.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    weights, others = (
        load_file(tmp_path / folder / "model" / "model.safetensors") for folder in ("one", "two")
    )
    for name, values in weights.items():
        if not name.endswith("key.bias"):
            np.testing.assert_allclose(others[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_mistake_is_one_line_in_every_process(data, tmp_path, backend):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    cluster = RunningCluster(tmp_path / "said", command_of(data, tmp_path / "run"), 2, backend)
    assert cluster.statuses() == [2, 2]
    for index in range(2):
        (line,) = cluster.err(index)
        assert "`output_dir` must be empty or hold this run" in line and "thesis.txt" in line


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_file_that_one_process_alone_misses_ends_all(data, tmp_path, backend):
    """A machine's disk may not be mounted: no process waits for it."""
    own = {1: [f"--input_file={tmp_path}/none.tfrecord"]}
    cluster = RunningCluster(tmp_path / "said", command_of(data, tmp_path / "run"), 2, backend, own)
    assert cluster.wait_for_end([1]) == [2]  # both have started
    assert_lost(cluster, [0], 60)
    rule = f"`input_file` must match at least one file. Received: '{tmp_path}/none.tfrecord'"
    (line,) = cluster.err(1)
    assert line == f"run_pretraining.py: error: {rule}."
    assert not list((tmp_path / "run").glob("checkpoint-*"))
