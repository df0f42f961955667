"""Training speed: the whole data's factor, ratios of neighbors, honest baselines."""

import contextlib
import json
import types

import keras
import numpy as np
import pytest
from benchmark_command import tables_of, write_config
from tiny import CONFIG

from benchmarks import training_speed
from benchmarks.peers import process, training
from benchmarks.synthetic_data import plan_corpus, sums_of_a_row
from benchmarks.training_speed import PACKED, PLAIN, PLAIN_ON_PACKS, UNPACKED
from bert_packed.training.step_report import StepProgram

TOY = {"max_seq_length": 16, "max_sequences_per_pack": 4, "batch_size": 3, "repeats": 7}
HISTOGRAM = np.bincount([4, 9, 16], [600, 300, 100])[1:].astype(np.int64)
SECONDS = {
    PLAIN_ON_PACKS: [2, 2, 4, 2, 2, 2, 2],
    PACKED: [2.02, 2.04, 4.12, 2.08, 2.1, 2.12, 2.14],  # 1 %, 2 %, ... 7 % longer
    PLAIN: [2.02, 2.04, 4.12, 2.08, 2.1, 2.12, 1.07],  # but for the last as long as packed
    UNPACKED: [4.04, 4.08, 8.24, 4.16, 4.2, 4.24, 4.28],
    "transformers, sorted by length": [2.02 * 3, 2.04, 4.12 * 2, 2.08, 2.1, 2.12, 2.14],
    "padding-free, memory kept": [3.03, 3.06, 6.18, 3.12, 3.15, 3.18, 3.21],  # 1.5 times as long as packed
}


@pytest.fixture(scope="module")
def corpus():
    return plan_corpus(HISTOGRAM, 4)


def test_sorted_batches_are_the_data_in_order():
    for histogram, expected in (([4, 0, 2, 0, 2], [1, 1, 3, 5]), ([3, 0, 2], [1, 3])):
        given = np.array(histogram), len(expected), np.random.default_rng(0)
        assert sorted(training_speed.sorted_lengths(*given).tolist()) == expected


def test_speeds_are_of_the_data(corpus):
    rows = {row.pop("way"): row for row in training_speed.step_rows(SECONDS, corpus, 3)}
    assert rows[PLAIN_ON_PACKS]["sequences/s"] is None
    for name, median in ((PACKED, 2.1), (UNPACKED, 4.2), ("padding-free, memory kept", 3.15)):
        row, sums = rows[name], sums_of_a_row(corpus, name != UNPACKED)
        assert row["s/step"] == median
        assert row["sequences/s"] == pytest.approx(3 * sums["num_sequences"] / median)
        assert row["real tokens/s"] == pytest.approx(3 * sums["num_tokens"] / median)
    mean = np.mean(SECONDS["transformers, sorted by length"])
    assert rows["transformers, sorted by length"]["s/step"] == pytest.approx(mean)


def test_ratios_are_of_neighbors_times_the_factor():
    rows = {row.pop("figure"): row for row in training_speed.speed_up_rows(SECONDS, 2.0, is_printed=True)}
    overhead = rows["overhead of packing, % of the step"]
    assert [overhead[name] for name in ("median", "from", "to")] == pytest.approx([4, 1, 7])
    assert overhead["print"] == 4.287
    assert rows["speed-up over plain"]["median"] == pytest.approx(2.0)
    assert rows["speed-up over plain"]["from"] == pytest.approx(1.0)  # the last took half of packed
    assert rows["speed-up over plain"]["print"] == 1.913 and rows["speed-up over plain"]["at least"] is None
    share = rows["share of the packing factor, over plain"]
    assert (share["median"], share["at least"]) == (1.0, 0.98)
    assert share["print"] == pytest.approx(0.958, abs=1e-3)
    assert rows["speed-up over unpacked"]["median"] == pytest.approx(4.0)
    assert rows["speed-up over unpacked"]["print"] is None
    # The sequences are the same as in the packs: no factor comes on top
    assert rows["speed-up over padding-free, memory kept"]["median"] == pytest.approx(1.5)
    assert "share of the packing factor, over padding-free, memory kept" not in rows
    by_length = rows["speed-up over transformers, sorted by length"]
    assert by_length["median"] == pytest.approx(2.0 * 10 / 7) and by_length["from"] is None
    assert {row["print"] for row in training_speed.speed_up_rows(SECONDS, 2.0, is_printed=False)} == {None}


def test_xla_s_counts_are_compared():
    plain = StepProgram("", 1.0, flops=400.0, bytes_accessed=1000.0)
    packed = StepProgram("", 1.0, flops=402.0, bytes_accessed=950.0)
    added = training_speed.count_row(plain, packed)
    assert added["packing adds, % of the operations"] == pytest.approx(0.5)
    assert added["packing adds, % of the bytes moved"] == pytest.approx(-5)


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(tmp_path):
    """Nothing is replaced: engines and clock are real."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"lengths": [4, 9, 16], "counts": [600, 300, 100]}))
    config = write_config(tmp_path / "config.json")
    flags = {**TOY, "histogram": lengths, "bert_config_file": config, "batch_size": 2, "micro_batch_size": 1}
    tables = tables_of("training_speed", tmp_path, **flags)
    assert all(row["s/step"] > 0 for row in tables["steps"])
    assert ("XLA's count" in tables) == (keras.backend.backend() == "jax")


def test_peers_are_asked_for_their_rows(monkeypatch):
    """No torch is needed: each process steps on its own batches."""
    called = []

    @contextlib.contextmanager
    def start(model_config, *given, keeps_memory):
        yield types.SimpleNamespace(call=lambda *of: called.append((*given, keeps_memory, *of)))

    processes = {"transformers": False, "transformers, memory kept": True}
    monkeypatch.setattr(process, "torch_processes", lambda: processes)
    for name in ("transformers_training", "padding_free_training"):
        monkeypatch.setattr(training, name, start)
    batches = {PACKED: ["p"], UNPACKED: ["a", "b"], "sorted by length": ["c"]}
    with contextlib.ExitStack() as stack:
        ways = training_speed.peer_ways(CONFIG, batches, stack)
        for way in ways.values():
            way(5)
    rows = {"padded": ["a", "b"], "sorted by length": ["c"]}
    expected = {}
    for kept, keeps_memory in (("", False), (", memory kept", True)):
        for name in rows:
            expected[f"transformers{kept}, {name}"] = (rows, keeps_memory, "step", name, 5)
        expected[f"padding-free{kept}"] = (["p"], "one by one", keeps_memory, "step", 5)
    assert dict(zip(ways, called, strict=True)) == expected
