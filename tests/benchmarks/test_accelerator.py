"""The benchmark of accelerators: a planted fault is seen, parts fit the time, figures are of the corpus."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import types

import next_tokens
import numpy as np
import pytest
from benchmark_command import tables_of
from modern_bert_models import CONFIG as MODERN_BERT
from packs import packed_and_unpacked
from tiny import CONFIG

from benchmarks import accelerator
from benchmarks.accelerator import (
    FUSED,
    PACKED,
    PADDED,
    UNPACKED,
    AcceleratorConfig,
    Model,
    TimeLimit,
    exactness_row,
)
from benchmarks.peers import training
from benchmarks.synthetic_data import sums_of_a_row, wikipedia_corpus
from benchmarks.training_steps import first_head
from bert_packed.architectures.registry import FLOAT32, MIXED, family_of
from bert_packed.core.settings import InputError
from bert_packed.kernels import choose as kernels
from bert_packed.kernels.choose import Kernels
from bert_packed.runs import interleaved_timing

pytest.importorskip("jax", reason="pip install -e '.[jax]'")

TOY = {"models": "bert-tiny", "max_seq_length": 32, "batch_size": 4, "repeats": 6}
HEALTHY = dataclasses.replace(CONFIG, initializer_range=0.02)


@pytest.fixture(scope="module")
def corpus():
    return wikipedia_corpus(32)


def test_a_failed_part_or_check_is_the_exit_status(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(accelerator, "choose_backend", lambda: "jax")
    monkeypatch.setattr("bert_packed.runs.run_summary.measured_flops_per_second", lambda dtype: 1e9)
    for name in ("KERAS_BACKEND", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(accelerator, "measure_steps", lambda *_: ([], []))
    monkeypatch.setattr(accelerator, "exactness_row", fail)
    tables = tables_of("accelerator", tmp_path, (1,), **TOY)
    assert tables["left out"][0]["reason"] == "failed: no kernel for this"
    monkeypatch.setattr(accelerator, "exactness_row", lambda *_: {"failed": "a check"})
    assert tables_of("accelerator", tmp_path, (1,), **TOY)["exactness"][0]["failed"] == "a check"
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
def test_other_models_are_exact_too(uncompiled, corpus, config):
    batch = Model("toy", config, AcceleratorConfig(**TOY), corpus, "cpu", 1e6).batches(corpus.packed_batch)[0]
    row = exactness_row(config, batch, FLOAT32)
    assert row["failed"] == "none" and row["neighbors"] == 0 and row["sequences"] > 4


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
    assert limit.run("d", lambda: work(35), "programs", 7) == 35
    assert limit.run("e", lambda: work(1), "programs", 5) is None  # 50 s of 44, by the slower of both
    assert limit.left() == 44 and limit.run("f", lambda: work(1), "others") == 1
    reasons = ["needs about 80 s of 79 s left", "needs about 50 s of 44 s left"]
    assert [row["reason"] for row in limit.left_out] == reasons
    assert not limit.has_failed


def model_of(corpus, config=CONFIG, platform="cpu", **changes):
    settings = AcceleratorConfig(**{**TOY, **changes})
    return Model("toy", config, settings, corpus, platform, 1e6)


@pytest.mark.parametrize("config", [CONFIG, next_tokens.CONFIG], ids=["bert", "mamba"])
@pytest.mark.parametrize("way", [PACKED, UNPACKED, PADDED, "padding-free, flex"])
def test_rows_of_steps_follow_from_seconds_and_the_corpus(corpus, config, way):
    head = first_head(config)
    sums = sums_of_a_row(corpus, way not in (UNPACKED, PADDED), head)
    row = accelerator.step_row(model_of(corpus, config), way, [1.0, 2.0, 9.0])
    assert (row["model"], row["way"], row["s/step"]) == ("toy", way, 2.0)
    assert row["sequences/s"] == pytest.approx(4 / 2 * sums["num_sequences"])
    flops = 4 / 2 * family_of(config).load_models().count_flops(head, config, sums)
    assert row["share of the peak, %"] == pytest.approx(100 * flops / 1e6)


def test_speed_ups_are_of_neighbors_and_by_the_packing_factor(corpus):
    seconds = {PACKED: [2.0, 2.0], UNPACKED: [1.0, 2.0], FUSED: [1.0, 0.5]}
    rows = accelerator.our_speed_ups(model_of(corpus), seconds)
    assert {row["figure"]: row["median"] for row in rows} == {
        "packed over unpacked, dense": pytest.approx(0.75 * corpus.plan.packing_factor),
        "share of the packing factor": 0.75,
        f"{FUSED}, over dense": 3.0,
    }


def test_steps_of_peers_are_interleaved_with_ours(corpus, monkeypatch):
    """No torch is needed: each peer gets its batches, and the failure of one costs no other figure."""
    model, limit, called = model_of(corpus, platform="gpu", repeats=2), TimeLimit(1000), []

    @contextlib.contextmanager
    def padding_free_training(config, batches, kind, seconds, is_mixed):
        assert config == model.config and 0 < seconds <= 1000 and is_mixed
        np.testing.assert_equal(batches, model.batches(corpus.packed_batch))
        called.append(kind)
        yield types.SimpleNamespace(call=lambda method, repeat: called.append(f"{method} {repeat}"))
        called.append("ends")

    def transformers_training(config, rows, seconds, is_mixed):
        assert is_mixed
        np.testing.assert_equal(rows, {PADDED: model.batches(corpus.unpacked_batch)})
        raise InputError("`reference` needs torch")

    def ours(repeat):
        called.append(f"ours {repeat}")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(training, "transformers_training", transformers_training)
    monkeypatch.setattr(training, "padding_free_training", padding_free_training)
    monkeypatch.setattr(accelerator, "our_ways", lambda *_: {PACKED: ours, UNPACKED: lambda _: None})
    moments = itertools.count()  # each step takes as long
    monkeypatch.setattr(interleaved_timing.time, "perf_counter", lambda: next(moments))
    monkeypatch.setattr(kernels, "choose_kernels", lambda *_: Kernels({}, ""))
    steps, speed_ups = accelerator.measure_steps(model, limit)
    kinds = ["nested tensors", "flex"]
    names = [f"padding-free, {kinds[0]}", f"padding-free, {kinds[1]}, attention without dropout"]
    assert [row["way"] for row in steps] == [PACKED, UNPACKED, *names]
    assert [row["figure"] for row in speed_ups[2:]] == [f"{PACKED}, over {name}" for name in names]
    assert [row["median"] for row in speed_ups[2:]] == [
        1.0,
        1.0,
    ]  # of the same sequences
    assert limit.left_out == [{"part": f"toy, {PADDED}", "reason": "failed: `reference` needs torch"}]
    # Each takes a step on either batch, which compiles, before it is timed
    compiled, timed = ["step 0", "step 1"], ["ours 0", "step 0", "ours 0", "step 0", "step 1", "ours 1"]
    assert called == ["ours 0", "ours 0", "ours 1"] + [
        one for kind in kinds for one in (kind, *compiled, *timed, "ends")
    ]
