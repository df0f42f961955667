"""A killed run is continued by the same command and ends in the same bytes, wherever it was killed.

Of the random moments among the slow tests there are as many as it takes to kill everybody once;
`KILL_MOMENTS=50` tries as many as that.
"""

import os
import shutil
import time

import numpy as np
import pytest
from causal_files import write_causal
from crash import all_bytes, finish, kill_after, start
from unpacked_records import make_features, write_features

from bert_packed.records.manifests import read_manifest
from bert_packed.text.tokenization import SPECIAL_TOKENS
from data_gen import pack_job, pack_steps
from data_gen.jobs.output import INCOMPLETE_NAME
from data_gen.pack_config import PackConfig
from data_gen.pack_job import pack
from data_gen.text.create_config import CreateConfig
from data_gen.text.create_job import create

S = 64
NUM_KILLS = 3
# Whom some of every 16 kills are for in a run with two workers, see `kill_after`; the others are of runs
# without workers, which start in a tenth of the time
VICTIMS = {1: "group", 6: "process", 11: "worker"}
CYCLE = 16
NUM_SLOW_KILLS = int(os.environ.get("KILL_MOMENTS", CYCLE))


@pytest.fixture
def jobs(tmp_path):
    """Dict from name to a function and its settings, for inputs of a few files."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        write_features(tmp_path / f"{name}.tfrecord", make_features(rng.integers(3, S + 1, 3000), S, 7))
    words = [f"word{i}" for i in range(50)]
    (tmp_path / "words.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    for name in ("a", "b"):
        documents = [[" ".join(rng.choice(words, 9)) for _ in range(8)] for _ in range(40)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in documents))
    packing = {"input_file": f"{tmp_path}/*.tfrecord", "max_seq_length": S, "num_workers": 1}
    creating = {
        "input_file": f"{tmp_path}/a.txt,{tmp_path}/b.txt",
        "vocab_file": f"{tmp_path}/words.txt",
        "max_seq_length": S,
        "num_workers": 1,
        "eval_fraction": 0.1,
    }
    write_causal(tmp_path / "c.causal", rng.integers(2, S + 1, 500))
    causal = {
        **creating,
        "vocab_file": "",
        "vocab_size": 300,
        "objective": "causal_lm",
        "tokenizer": "byte_bpe",
    }
    rows = {**packing, "input_file": f"{tmp_path}/c.causal", "split_sequences": True, "num_rows": 4}
    return {
        "create causal": (create, CreateConfig, {**causal, "num_shards": 2, "provenance": True}),
        "pack rows": (pack, PackConfig, {**rows, "num_shards": 2, "provenance": True}),
        "pack": (pack, PackConfig, {**packing, "num_shards": 3, "provenance": True}),
        "create": (create, CreateConfig, {**creating, "num_shards": 3, "provenance": True}),
    }


def complete(job, folder):
    """Run a job without a kill; returns the bytes."""
    function, config_class, settings = job
    assert finish(start(function, config_class(output_dir=str(folder), **settings))) == 0
    return all_bytes(folder)


def continue_and_compare(job, folder, expected):
    """The same command again, in this process, ends in the expected bytes, unless it was complete already."""
    function, config_class, settings = job
    is_to_continue = (folder / INCOMPLETE_NAME / "work" / "identity.json").exists()
    if settings.get("overwrite") or read_manifest(folder) is None or is_to_continue:
        function(config_class(output_dir=str(folder), **settings))
        assert all_bytes(folder) == expected
    else:
        found = {name: data for name, data in all_bytes(folder).items() if INCOMPLETE_NAME not in name}
        assert found == expected


@pytest.mark.parametrize(
    ("name", "overwrite", "stride"),
    [
        ("pack", True, 12),
        ("create", False, 20),
        ("create causal", False, 40),
        ("pack rows", False, 40),
        *(
            pytest.param(name, overwrite, 1, marks=pytest.mark.slow)
            for name in ("pack", "create")
            for overwrite in (False, True)
        ),
        # They change names in the same places, by the same code
        *(pytest.param(name, True, 5, marks=pytest.mark.slow) for name in ("create causal", "pack rows")),
    ],
)
def test_killed_at_changes_of_names(tmp_path, jobs, name, overwrite, stride):
    """Files appear, move and vanish at these changes: with stride 1, at every state that a kill can leave."""
    function, config_class, settings = jobs[name]
    expected = complete(jobs[name], tmp_path / "whole")
    job = (function, config_class, {**settings, "overwrite": overwrite})
    fatal_change, num_incomplete = 2, 0
    if overwrite:  # with one shard more, all the names are others
        complete((function, config_class, {**settings, "num_shards": 4}), tmp_path / "earlier")
    while True:
        folder = tmp_path / f"out-{fatal_change}"
        if overwrite:
            shutil.copytree(tmp_path / "earlier", folder)
        process = start(function, config_class(output_dir=str(folder), **job[2]), fatal_change)
        if finish(process) == 0:
            break
        num_incomplete += read_manifest(folder) is None
        continue_and_compare(job, folder, expected)
        fatal_change += stride
    assert fatal_change > 20 and num_incomplete > 0


@pytest.mark.parametrize("name", ["pack", pytest.param("create", marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, jobs, name):
    kill_at_random_moments(tmp_path, jobs[name], NUM_KILLS, seed=0, victims={})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack", "create"])
def test_killed_at_many_random_moments(tmp_path, jobs, name):
    kill_at_random_moments(tmp_path, jobs[name], NUM_SLOW_KILLS, seed=1, victims=VICTIMS)


def kill_at_random_moments(tmp_path, job, num_kills, seed, victims):
    function, config_class, settings = job
    durations = {}
    for num_workers in (1, 2) if victims else (1,):
        began = time.monotonic()
        folder = tmp_path / f"whole-{num_workers}"
        expected = complete((function, config_class, {**settings, "num_workers": num_workers}), folder)
        durations[num_workers] = time.monotonic() - began
    rng = np.random.default_rng(seed)
    num_killed = number = 0
    while num_killed < num_kills:
        folder = tmp_path / f"out-{number}"
        number += 1
        victim = victims.get(num_killed % CYCLE)
        num_workers = 2 if victim else 1
        config = config_class(output_dir=str(folder), **{**settings, "num_workers": num_workers})
        process = start(function, config)
        num_killed += kill_after(process, rng.uniform(0, durations[num_workers]), victim or "process")
        if folder.exists():
            continue_and_compare(job, folder, expected)
        assert number < 20 * num_kills  # else the moments are past the end, and nothing is tested


def test_finished_steps_are_not_done_again(tmp_path, jobs, monkeypatch):
    function, config_class, settings = jobs["pack"]
    expected = complete(jobs["pack"], tmp_path / "whole")
    config = config_class(output_dir=str(tmp_path / "out"), **settings)
    assert finish(start(function, config, fatal_name="write-000001.done")) != 0
    assert list((tmp_path / "out").glob(f"{INCOMPLETE_NAME}/work/write-000001.done"))
    calls = []

    def counted(step):
        def count(work):
            calls.append(step.__name__)
            return step(work)

        return count

    for name in ("read_file", "sort_run", "measure_part", "write_shard"):
        monkeypatch.setattr(pack_job, name, counted(getattr(pack_steps, name)))
    pack(config)
    assert calls == ["write_shard"]
    assert all_bytes(tmp_path / "out") == expected


def test_other_settings_or_inputs_begin_anew(tmp_path, jobs):
    function, config_class, settings = jobs["pack"]
    folder = tmp_path / "out"
    assert finish(start(function, config_class(output_dir=str(folder), **settings), fatal_change=25)) != 0
    assert (folder / INCOMPLETE_NAME).exists()
    other = (function, config_class, {**settings, "random_seed": 99})
    assert complete(other, folder) == complete(other, tmp_path / "fresh")

    folder = tmp_path / "out2"
    assert finish(start(function, config_class(output_dir=str(folder), **settings), fatal_change=25)) != 0
    write_features(tmp_path / "b.tfrecord", make_features(np.full(3000, 5), S, 8))
    assert complete(jobs["pack"], folder) == complete(jobs["pack"], tmp_path / "fresh2")


def test_a_second_run_is_refused_while_the_first_lives(tmp_path, jobs):
    function, config_class, settings = jobs["pack"]
    config = config_class(output_dir=str(tmp_path / "out"), **settings)
    process = start(function, config)
    while process.is_alive() and not (tmp_path / "out" / INCOMPLETE_NAME).exists():
        time.sleep(0.001)
    with pytest.raises(ValueError, match="being written by another run"):
        pack(config)
    assert finish(process) == 0
