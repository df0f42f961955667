"""The benchmark of accelerators at toy size on a CPU: complete tables, exact packing, a planted fault."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import next_tokens
import numpy as np
import pytest
from benchmark_command import run_benchmark, tables_of
from modern_bert_models import CONFIG as MODERN_BERT
from packs import packed_and_unpacked
from tiny import CONFIG

from benchmarks import accelerator, accelerator_steps
from benchmarks.accelerator import AcceleratorConfig, TimeLimit, exactness_row
from benchmarks.accelerator_steps import FUSED, PACKED, PADDED, UNPACKED, Model
from benchmarks.peers import training
from benchmarks.synthetic_data import sums_of_a_row, wikipedia_corpus
from benchmarks.training_steps import first_head
from bert_packed.architectures.bert.model import count_flops
from bert_packed.architectures.registry import FLOAT32, MIXED, PRETRAINING, family_of
from bert_packed.core.settings import InputError
from bert_packed.kernels import choose as kernels
from bert_packed.kernels.choose import Kernels
from bert_packed.parallel.targets import ACCELERATORS, accelerator_of
from bert_packed.training.step_report import StepProgram, search_largest

pytest.importorskip("jax", reason="pip install -e '.[jax]'")

TOP = Path(__file__).resolve().parents[2]
TOY = {"models": "bert-tiny", "max_seq_length": 32, "batch_size": 4, "repeats": 6}
TABLES = ["device", "data", "exactness", "steps", "speed-ups", "largest micro-batch", "left out"]
HEALTHY = dataclasses.replace(CONFIG, initializer_range=0.02)


@pytest.fixture(scope="module")
def corpus():
    return wikipedia_corpus(32)


def run_command(path, *flags):
    """The command in a process of its own, under JAX: content of its file and its output."""
    given = [f"--{name}={value}" for name, value in TOY.items()]
    # However busy the machine is
    given += [f"--json={path}", "--minutes=60", *flags]
    command = [sys.executable, "-m", "benchmarks.accelerator", *given]
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(command, env=environment, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def check_tables(content, ways):
    """Properties of a run on a CPU."""
    tables = content["tables"]
    assert list(tables) == TABLES
    (device,) = tables["device"]
    assert (device["device"], device["platform"], device["memory, GiB"]) == ("cpu", "cpu", None)
    assert device["peak, TFLOP/s"] > 0 and device["peak from"] == "a product measured here"
    assert content["notes"] == ["Measured on a CPU: no figure is an accelerator's."]
    precise, mixed = tables["exactness"]
    assert (precise["precision"], mixed["precision"]) == (FLOAT32, MIXED)
    for row in (precise, mixed):
        assert row["sequences"] > 4 and row["neighbors"] == 0 and row["failed"] == "none"
    assert max(precise[name] for name in ("outputs", "losses", "gradients")) < 1e-5 < mixed["gradients"]
    steps = {row["way"]: row for row in tables["steps"]}
    assert list(steps) == ways
    (data,) = tables["data"]
    tokens = {way: row["real tokens/s"] * row["s/step"] for way, row in steps.items()}
    assert tokens[PACKED] / tokens[UNPACKED] == pytest.approx(data["packing factor"])
    assert tokens[PACKED] <= TOY["batch_size"] * TOY["max_seq_length"]
    for row in steps.values():
        assert row["sequences/s"] > 0 and row["share of the peak, %"] > 0
    for row in tables["speed-ups"]:
        low, high = (row["median"] if row[name] is None else row[name] for name in ("from", "to"))
        assert 0 < low <= row["median"] <= high
    speed_up, share = tables["speed-ups"][:2]
    assert speed_up["median"] == pytest.approx(data["packing factor"] * share["median"])
    assert tables["largest micro-batch"] == []
    assert tables["left out"] == [
        {"part": "bert-tiny, largest micro-batch", "reason": "the device reports no memory to fill"}
    ]


def test_the_command_on_a_cpu(tmp_path):
    content, printed = run_command(tmp_path / "out.json", "--parts=exactness,steps,largest")
    check_tables(content, [PACKED, UNPACKED])
    assert content["machine"]["backend"] == "jax" and "Measured on a CPU" in printed


@pytest.mark.slow  # imports torch and transformers
def test_the_command_with_its_peers(tmp_path):
    pytest.importorskip("torch", reason="pip install -e '.[reference]'")
    content, _ = run_command(tmp_path / "out.json", "--repeats=1")  # the last of a flag counts
    peers = [PADDED, "padding-free, one by one"]
    check_tables(content, [PACKED, UNPACKED, *peers])
    figures = [row["figure"] for row in content["tables"]["speed-ups"]]
    assert figures[2:] == [f"{PACKED}, over {name}" for name in peers]


@pytest.fixture
def jax_command(monkeypatch):
    """The command in this process, whatever its backend."""
    monkeypatch.setattr(accelerator, "choose_backend", lambda: "jax")
    monkeypatch.setattr("bert_packed.runs.step_cost.measured_flops_per_second", lambda dtype: 1e9)
    for name in ("KERAS_BACKEND", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_what_does_not_fit_is_left_out(tmp_path, jax_command, capsys):
    tables = tables_of("accelerator", tmp_path, minutes=0, **TOY)
    assert list(tables) == TABLES and len(tables["device"]) == len(tables["data"]) == 1
    assert not any(tables[name] for name in TABLES[2:-1])
    left_out = {row["part"]: row["reason"] for row in tables["left out"]}
    assert list(left_out) == [
        "exactness, float32, dense",
        "exactness, mixed_bfloat16, dense",
        "bert-tiny, programs, packed, dense",
        "bert-tiny, timed steps and peers",
        "bert-tiny, largest micro-batch",
    ]
    assert left_out["exactness, float32, dense"] == "the time is over"
    assert "left out  bert-tiny, timed steps and peers: no compiled steps" in capsys.readouterr().out


def test_another_backend_is_refused(jax_command, monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "choose_backend", lambda: "tensorflow")
    assert run_benchmark("accelerator") == 2
    assert "KERAS_BACKEND must be jax or empty" in capsys.readouterr().err


def test_a_failed_part_or_check_is_the_exit_status(tmp_path, jax_command, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(accelerator, "measure_steps", lambda *_: ([], []))
    monkeypatch.setattr(accelerator, "exactness_row", fail)
    tables = tables_of("accelerator", tmp_path, status=1, **TOY)
    assert tables["left out"][0]["reason"] == "failed: no kernel for this"
    monkeypatch.setattr(accelerator, "exactness_row", lambda *_: {"failed": "a check"})
    assert tables_of("accelerator", tmp_path, status=1, **TOY)["exactness"][0]["failed"] == "a check"
    monkeypatch.setattr(accelerator, "exactness_row", lambda *_: {"failed": "none"})
    tables_of("accelerator", tmp_path, **TOY)


@pytest.mark.parametrize("dtype", [FLOAT32, MIXED])
def test_a_model_without_the_mask_of_packs_is_noticed(uncompiled, dtype):
    packed, _ = packed_and_unpacked()
    row = exactness_row(HEALTHY, packed, dtype)
    assert row["failed"] == "none" and row["neighbors"] == 0 and row["sequences"] > len(packed["token_ids"])
    faulty = exactness_row(dataclasses.replace(HEALTHY, ablation_no_attention_mask=True), packed, dtype)
    assert faulty["neighbors"] > 0 and faulty["gradients"] > 0.2
    assert "neighbors: change of hidden_states" in faulty["failed"]
    assert "unpacked: gradients of all weights" in faulty["failed"]


@pytest.mark.parametrize(
    "config", [next_tokens.CONFIG, next_tokens.MAMBA2, MODERN_BERT], ids=["mamba", "mamba2", "modernbert"]
)
def test_other_models_are_checked_and_counted_too(uncompiled, corpus, config):
    settings = AcceleratorConfig(**TOY)
    model = Model("toy", config, settings, corpus, "cpu", 1e6)
    (batch,) = model.batches(corpus.packed_batch, 2, 1)
    row = exactness_row(config, batch, FLOAT32)
    assert row["failed"] == "none" and row["neighbors"] == 0 and row["sequences"] > 2
    row = accelerator_steps.step_row(model, PACKED, [2.0])
    head = first_head(config)
    flops = (
        4 / 2 * family_of(config).load_models().count_flops(head, config, sums_of_a_row(corpus, True, head))
    )
    assert row["share of the peak, %"] == pytest.approx(100 * flops / 1e6)


def test_a_part_takes_as_long_as_the_slowest_of_its_kind(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: now[0])

    def work(seconds):
        now[0] += seconds
        return seconds

    limit = TimeLimit(100)
    assert limit.run("a", lambda: work(20), "programs", 2) == 20
    assert limit.run("b", lambda: work(1), "others") == 1
    assert limit.run("c", lambda: work(1), "programs", 8) is None  # 80 s of 79
    assert limit.run("d", lambda: work(70), "programs", 7) == 70
    assert limit.left() == 9 and limit.run("e", lambda: work(1), "others") == 1
    assert limit.left_out == [{"part": "c", "reason": "needs about 80 s of 79 s left"}]
    assert not limit.has_failed


def test_peaks_are_those_of_data_sheets():
    assert accelerator_of("NVIDIA H100 80GB HBM3") is ACCELERATORS["h100"]
    assert accelerator_of("TPU v5 lite") is ACCELERATORS["v5e"]
    assert accelerator_of("NVIDIA H100 PCIe") is accelerator_of("cpu") is None


def model_of(corpus, platform="cpu", **changes):
    settings = AcceleratorConfig(**{**TOY, **changes})
    return Model(
        "toy", dataclasses.replace(CONFIG, attention_probs_dropout_prob=0.1), settings, corpus, platform, 1e6
    )


@pytest.mark.parametrize("kernel", [{}, {"attend": "kernel"}, {"scan": "kernel"}])
def test_the_kernel_is_measured_where_there_is_one(corpus, monkeypatch, kernel):
    model = model_of(corpus)

    def choose(attention, config, length, platform):
        assert (attention, config, length, platform) == ("auto", model.config, 32, "cpu")
        return Kernels(kernel, "")

    monkeypatch.setattr(kernels, "choose_kernels", choose)
    found = accelerator_steps.our_kernels(model)
    assert found == ({PACKED: {}, FUSED: kernel} if kernel else {PACKED: {}})


def test_rows_of_steps_follow_from_seconds_and_the_corpus(corpus):
    model = model_of(corpus)
    for way in (PACKED, UNPACKED, PADDED, "padding-free, flex"):
        sums = sums_of_a_row(corpus, way not in (UNPACKED, PADDED))
        row = accelerator_steps.step_row(model, way, [1.0, 2.0, 9.0])
        assert (row["model"], row["way"], row["s/step"]) == ("toy", way, 2.0)
        assert row["sequences/s"] == pytest.approx(4 / 2 * sums["num_sequences"])
        flops = 4 / 2 * count_flops(PRETRAINING, model.config, sums)
        assert row["share of the peak, %"] == pytest.approx(100 * flops / 1e6)
    seconds = {PACKED: [2.0, 2.0], UNPACKED: [1.0, 2.0], FUSED: [1.0, 0.5]}
    rows = {row["figure"]: row["median"] for row in accelerator_steps.our_speed_ups(model, seconds)}
    assert rows == {
        "packed over unpacked, dense": pytest.approx(0.75 * corpus.plan.packing_factor),
        "share of the packing factor": 0.75,
        f"{FUSED}, over dense": 3.0,
    }


def test_peers_are_timed_in_turns_beside_ours(corpus, monkeypatch):
    """Without torch: which batches each peer gets, and that the failure of one costs no other figure."""
    model, limit, called, kinds = model_of(corpus, "gpu", repeats=2), TimeLimit(1000), [], []

    @contextlib.contextmanager
    def padding_free_training(config, batches, kind, seconds, is_mixed):
        assert config == model.config and 0 < seconds <= 1000
        np.testing.assert_equal(batches, model.batches(corpus.packed_batch))
        kinds.append(kind)
        called.append("starts")
        yield types.SimpleNamespace(call=lambda method, repeat: called.append(f"{method} {repeat}"))
        called.append("ends")

    def transformers_training(config, rows, seconds, is_mixed):
        assert is_mixed
        np.testing.assert_equal(rows, {"padded": model.batches(corpus.unpacked_batch)})
        raise InputError("`reference` needs torch")

    def ours(repeat):
        called.append(f"ours {repeat}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(training, "transformers_training", transformers_training)
    monkeypatch.setattr(training, "padding_free_training", padding_free_training)
    monkeypatch.setattr(accelerator_steps, "our_ways", lambda *_: {PACKED: ours, UNPACKED: lambda _: None})
    monkeypatch.setattr(kernels, "choose_kernels", lambda *_: Kernels({}, ""))
    steps, speed_ups = accelerator_steps.measure_steps(model, limit)
    names = ["padding-free, varlen", "padding-free, flex, attention without dropout"]
    assert [row["way"] for row in steps] == [PACKED, UNPACKED, *names]
    assert [row["figure"] for row in speed_ups[2:]] == [f"{PACKED}, over {name}" for name in names]
    assert limit.left_out == [{"part": f"toy, {PADDED}", "reason": "failed: `reference` needs torch"}]
    # Each takes a step on either batch, which compiles, before it is timed
    compiled, timed = ["step 0", "step 1"], ["ours 0", "step 0", "ours 0", "step 0", "step 1", "ours 1"]
    turns = [["starts", *compiled, *timed, "ends"] for _ in names]
    assert called == ["ours 0", "ours 0", "ours 1", *turns[0], *turns[1]]
    assert kinds == ["varlen", "flex"]


def test_peers_alone_are_beside_our_fastest_step(corpus, monkeypatch):
    """Neither the dense step nor rows are compiled, and each peer has our step beside it in the table."""
    model, limit, compiled = model_of(corpus, "gpu", parts="peers"), TimeLimit(1000), []

    def our_ways(model, way, kernel):
        compiled.append(way)
        return {way: lambda _: None}

    monkeypatch.setattr(accelerator_steps, "our_ways", our_ways)
    monkeypatch.setattr(accelerator_steps, "our_kernels", lambda _: {PACKED: {}, FUSED: {"attend": 1}})
    monkeypatch.setattr(accelerator_steps, "peers", lambda *_: {"first": None, "second": None})
    monkeypatch.setattr(
        accelerator_steps, "time_peer", lambda _, __, name, best, *rest: {best: [1.0, 1.0], name: [3.0, 3.0]}
    )
    steps, speed_ups = accelerator_steps.measure_steps(model, limit)
    assert compiled == [FUSED]
    assert [row["way"] for row in steps] == [FUSED, "first", FUSED, "second"]
    assert [(row["figure"], row["median"]) for row in speed_ups] == [
        (f"{FUSED}, over first", 3.0),
        (f"{FUSED}, over second", 3.0),
    ]
    assert accelerator_steps.measure_steps(model_of(corpus, parts="exactness"), limit) == ([], [])


def test_no_peers_where_torch_does_not_compute_or_is_missing(corpus, monkeypatch):
    limit = TimeLimit(1000)
    assert accelerator_steps.peers(model_of(corpus, parts="steps"), limit) == {} and not limit.left_out
    assert accelerator_steps.peers(model_of(corpus, "tpu"), limit) == {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert accelerator_steps.peers(model_of(corpus), limit) == {}
    assert limit.left_out == [
        {"part": "toy, peers", "reason": "torch does not compute on a TPU here"},
        {
            "part": "toy, peers",
            "reason": "pip install -e '.[reference]' brings torch and transformers",
        },
    ]


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 7, 8, 40, 100])
@pytest.mark.parametrize("first", [1, 8, 32])
@pytest.mark.parametrize("share", [0.5, 1, 2])  # of the room that is left: memory grows faster, or slower
def test_the_search_finds_what_fits(capacity, first, share):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= capacity

    def in_proportion(size):
        return int(size + share * (capacity - size))

    largest = search_largest(fits, in_proportion, first)
    assert largest <= capacity < largest + max(largest // 16, 1) + 1
    assert len(tried) == len(set(tried)) <= 2 + 2 * math.log2(max(capacity, first) + 1)
    answers = iter([True, False, None])
    assert search_largest(lambda _: next(answers), lambda size: 2 * size, first) == first


def test_micro_batches_are_beside_the_plan(corpus, monkeypatch):
    def try_size(model, size):
        program = StepProgram(
            "", 1.0, argument_bytes=0, output_bytes=0, aliased_bytes=0, temporary_bytes=size << 30
        )
        return (None if size == 16 else program), size <= 6

    monkeypatch.setattr(accelerator_steps, "try_size", try_size)
    limit = TimeLimit(100)
    rows = accelerator_steps.largest_rows(model_of(corpus), 7.5, limit)
    assert {
        row["packs at once"]: (row["planned, GiB"], row["fits by plan"], row["runs"]) for row in rows
    } == {
        4: (4, True, True),
        7: (7, True, False),  # as the plan has it, yet it does not run
        5: (5, True, True),
        6: (6, True, True),
    }
    assert not limit.left_out
    (row,) = accelerator_steps.largest_rows(model_of(corpus, batch_size=16), 7.5, TimeLimit(100))[:1]
    assert row["planned, GiB"] is row["fits by plan"] is None and not row["runs"]
    assert accelerator_steps.largest_rows(model_of(corpus), 7.5, late := TimeLimit(0)) == []
    assert late.left_out[0]["part"] == "toy, largest micro-batch, 4"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"models": "bert-tiny,bert-mimi"}, "must be different ones of bert-tiny, bert-mini, "),
        ({"minutes": -1}, "`minutes` must be at least 0"),
        ({"max_seq_length": 1024}, "`max_seq_length` must be at most max_position_embeddings=512"),
    ],
)
def test_mistakes_are_one_line(jax_command, capsys, flag, message):
    assert run_benchmark("accelerator", **flag) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
