"""The speed-up of packing: the factor of a whole plan, ratios of neighbours, utilisation, by told times."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from clock import Clock
from tiny import CONFIG

from benchmarks import keras_hub_reference, speed_up, training_ways
from benchmarks.speed_up import SpeedUpConfig, printed_of
from benchmarks.speed_up_measurement import make_data, ratio_rows, sorted_lengths, step_rows
from benchmarks.synthetic_data import write_sequences
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.models.flops import bert_flops
from bert_packed.packing.plan import validate_plan
from bert_packed.runs import interleaved_timing, step_cost

COUNTS = {4: 600, 9: 300, 16: 100}
NEEDS = {"max_seq_length": 16, "max_sequences_per_pack": 4, "batch_size": 3, "repeats": 7}
SECONDS = {
    "plain, packs": [2, 2, 4, 2, 2, 2, 2],
    "packed": [2.02, 2.04, 4.12, 2.08, 2.1, 2.12, 2.14],  # 1 %, 2 %, ... 7 % longer
    "plain": [2.02, 2.04, 4.12, 2.08, 2.1, 2.12, 1.07],  # but for the last as long as packed
    "unpacked": [2.02, 2.04, 4.12, 2.08, 2.1, 2.12, 2.14],
}


def command(*flags):
    return run(speed_up.main, SpeedUpConfig, speed_up.DESCRIPTION, ["speed_up", *flags])


@pytest.fixture
def histogram_file(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"lengths": list(COUNTS), "counts": list(COUNTS.values())}))
    return str(path)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps(dataclasses.asdict(CONFIG)))
    return path


def test_the_plan_is_of_all_sequences_and_the_batches_of_the_plan(histogram_file):
    config = SpeedUpConfig(histogram=histogram_file, reference=True, **NEEDS)
    data = make_data(config, CONFIG)
    histogram = np.bincount(list(COUNTS), list(COUNTS.values()), 17)[1:].astype(np.int64)
    np.testing.assert_array_equal(data.histogram, histogram)
    validate_plan(data.plan, histogram)
    described = data.describe()
    assert described["sequences"] == 1000
    assert described["packing factor"] == 1000 / described["packs"] == data.plan.packing_factor
    strategies = set(data.plan.strategies)
    for batch in data.packed:
        assert batch["token_ids"].shape == (3, 16)
        for row in batch["sequence_ids"]:
            assert tuple(sorted(np.bincount(row[row > 0])[1:].tolist())) in strategies
    for batch in (*data.unpacked, *data.by_length):
        assert batch["slot_weights"].sum() == 3 and batch["slot_weights"].shape[1] == 1
    assert {batch["token_ids"].shape[1] for batch in data.unpacked} == {16}
    for batch in data.by_length:  # no longer than their longest
        assert (batch["sequence_ids"] > 0).sum(axis=1).max() == batch["token_ids"].shape[1]
    assert len(data.by_length) == config.repeats


def test_depth_and_seed_arrive(histogram_file):
    def made(**changes):
        return make_data(SpeedUpConfig(histogram=histogram_file, **NEEDS | changes), CONFIG)

    depths = {depth: made(max_sequences_per_pack=depth).describe()["depth"] for depth in (1, 2, 4)}
    assert depths == {1: 1, 2: 2, 4: 4}
    ids = [made(random_seed=seed).packed[0]["token_ids"] for seed in (1, 1, 2)]
    assert np.array_equal(ids[0], ids[1]) and not np.array_equal(ids[0], ids[2])


def test_what_a_row_holds_is_the_mean_of_the_data(histogram_file):
    data = make_data(SpeedUpConfig(histogram=histogram_file, **NEEDS), CONFIG)
    rows = data.sums(is_packed=False)
    assert rows == {
        "num_tokens": pytest.approx(0.6 * 4 + 0.3 * 9 + 0.1 * 16),
        "num_pairs": pytest.approx(0.6 * 16 + 0.3 * 81 + 0.1 * 256),
        "num_predictions": pytest.approx(0.6 * 1 + 0.3 * 1 + 0.1 * 2),
        "num_sequences": 1,
    }
    packs = data.sums(is_packed=True)
    for name, value in rows.items():
        assert packs[name] == pytest.approx(value * data.plan.packing_factor)


def test_sorted_batches_are_the_data_in_order():
    histogram = np.array([4, 0, 2, 0, 2])
    batches = sorted_lengths(histogram, 2, 4, np.random.default_rng(0))
    assert sorted(map(tuple, batches.tolist())) == [(1, 1), (1, 1), (3, 3), (5, 5)]
    many = sorted_lengths(1000 * histogram, 4, 8, np.random.default_rng(0))
    assert np.bincount(many.ravel()).tolist() == [0, 16, 0, 8, 0, 8]


def test_ratios_are_of_neighbours_with_intervals_and_times_the_factor(histogram_file):
    data = make_data(SpeedUpConfig(histogram=histogram_file, **NEEDS), CONFIG)
    factor = data.plan.packing_factor
    seconds = SECONDS | {"transformers, sorted": [2.02 * 3, 2.04, 4.12 * 2, 2.08, 2.1, 2.12, 2.14]}
    rows = ratio_rows(seconds, data, {"overhead": 4.287, "realised": 1.913, "share": 0.958}, 0.98)
    overhead, plain, share, unpacked, share_unpacked, by_length = ({**row} for row in rows)
    assert overhead == {
        "figure": "overhead of packing, % of the step",
        "median": pytest.approx(4.0),
        "from": pytest.approx(1.0),
        "to": pytest.approx(7.0),
        "print": 4.287,
        "asked": None,
    }
    assert list(share.values())[1:] == [1.0, 0.5, 1.0, 0.958, 0.98]
    assert list(plain.values())[1:] == [factor, factor / 2, factor, 1.913, None]
    assert unpacked["median"] == factor and unpacked["print"] is None
    assert list(share_unpacked.values())[1:] == [1.0, 1.0, 1.0, None, None]
    assert by_length["median"] == pytest.approx(factor * 10 / 7) and by_length["from"] is None


def test_speeds_and_utilisation_are_of_the_data(histogram_file):
    data = make_data(SpeedUpConfig(histogram=histogram_file, **NEEDS), CONFIG)
    rows = {row.pop("way"): row for row in step_rows(SECONDS, data, CONFIG, 3, peak=1e6)}
    assert rows["plain, packs"]["sequences/s"] is None
    for name, is_packed in (("packed", True), ("unpacked", False)):
        row, sums = rows[name], data.sums(is_packed)
        assert row["s/step"] == 2.1
        assert row["sequences/s"] == pytest.approx(3 * sums["num_sequences"] / 2.1)
        assert row["real tokens/s"] == pytest.approx(3 * sums["num_tokens"] / 2.1)
        expected = 100 * 3 * bert_flops(CONFIG, sums) / 2.1 / 1e6
        assert row["model-FLOP utilisation, %"] == pytest.approx(expected)


def test_the_command_times_each_way_on_its_batches(
    monkeypatch, tmp_path, histogram_file, config_file, capsys
):
    clock, seen, running = Clock(), {}, []

    class Engine:
        def __init__(self, name):
            self.name = name

        def train_step(self, batch):
            slots = batch["slot_weights"].shape[1]
            seen.setdefault((self.name, slots), []).append(batch)
            clock.now += {"plain": 1.0, "packed": 1.25, "unpacked": 1.25}[self.name]
            return {"num_sequences": 1.0}

    @contextlib.contextmanager
    def torch_ways(model_config, rows):
        assert [len(batches) for batches in rows.values()] == [2, 7]
        running.append("torch")
        yield {name: step for name in rows}
        running.clear()

    def step(_):
        assert running
        clock.now += 5

    names = ("plain", "packed", "unpacked")
    asked = []
    monkeypatch.setattr(interleaved_timing, "time", clock)
    monkeypatch.setattr(
        training_ways, "our_engines", lambda *of: asked.append(of) or {name: Engine(name) for name in names}
    )

    def keras_hub_ways(model_config, rows):
        assert [len(batches) for batches in rows.values()] == [2]
        return {name: lambda _: setattr(clock, "now", clock.now + 2.5) for name in rows}

    monkeypatch.setattr(training_ways, "torch_ways", torch_ways)
    monkeypatch.setattr(training_ways, "keras_hub_ways", keras_hub_ways)
    monkeypatch.setattr(keras_hub_reference, "is_installed", lambda: True)
    rates = [3e9, 5e9]
    monkeypatch.setattr(step_cost, "measured_flops_per_second", lambda: rates.pop(0))
    written = tmp_path / "all.json"
    flags = {**NEEDS, "histogram": histogram_file, "bert_config_file": config_file, "json": written}
    flags |= {"micro_batch_size": 1, "algorithm": "spfhp"}
    assert command("--reference", *(f"--{name}={value}" for name, value in flags.items())) == 0
    assert asked == [(CONFIG, 1)] and not running
    assert set(seen) == {("plain", 1), ("plain", 2), ("packed", 2), ("unpacked", 1)}  # depth by spfhp
    assert {len(batches) for batches in seen.values()} == {8}
    result = json.loads(written.read_text())
    factor = result["data"][0]["packing factor"]
    found = {row["figure"]: row["median"] for row in result["packing"]}
    assert found["overhead of packing, % of the step"] == pytest.approx(25)
    assert found["speed-up over plain"] == pytest.approx(0.8 * factor)
    assert found["speed-up over transformers, sorted"] == pytest.approx(4 * factor)
    assert found["speed-up over keras-hub, padded"] == pytest.approx(2 * factor)
    assert result["peak_flops"] == 5e9
    assert "utilisation of 5.0 GFLOP/s, measured" in capsys.readouterr().out


def test_records_give_their_lengths(tmp_path):
    paths = write_sequences(tmp_path / "records", 40, 32, num_files=1)
    data = make_data(SpeedUpConfig(input_file=paths[0], **NEEDS | {"max_seq_length": 24}), CONFIG)
    assert data.describe()["sequences"] == 40
    assert len(data.histogram) == 24 and data.histogram[-1] > 1  # what is longer is cut


def test_print_stands_beside_the_papers_data_alone():
    printed = {"overhead": 4.287, "realised": 1.913, "share": 1.913 / 1.996}
    assert printed_of(SpeedUpConfig()) == printed_of(SpeedUpConfig(histogram="wikipedia_512")) == printed
    assert printed_of(SpeedUpConfig(algorithm="nnlshp")) == printed
    assert printed_of(SpeedUpConfig(algorithm="spfhp"))["realised"] == 1.716
    assert printed_of(SpeedUpConfig(algorithm="spfhp", max_sequences_per_pack="max"))["realised"] == 1.905
    for change in (
        {"max_sequences_per_pack": "max"},  # print has another algorithm there
        {"algorithm": "lpfhp"},
        {"histogram": "glue_cola"},
        {"input_file": "x"},
        {"max_seq_length": 384},
        {"max_sequences_per_pack": 5},
    ):
        assert printed_of(SpeedUpConfig(**change)) == {}


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(tmp_path, histogram_file, config_file):
    """Nothing replaced: engines and clock."""
    written = tmp_path / "all.json"
    flags = {**NEEDS, "histogram": histogram_file, "bert_config_file": config_file, "json": written}
    flags |= {"batch_size": 2, "repeats": 6, "peak_gflops": 2.5}
    assert command(*(f"--{name}={value}" for name, value in flags.items())) == 0
    result = json.loads(written.read_text())
    rows = {row["way"]: row for row in result["steps"]}
    assert list(rows) == ["plain, packs", "packed", "plain", "unpacked"]
    assert result["peak_flops"] == 2.5e9
    assert all(row["s/step"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"histogram": "a", "input_file": "b"},
            "`histogram` must be left out with input_file=b. Received: a",
        ),
        ({"batch_size": 4, "micro_batch_size": 3}, "`micro_batch_size` must divide `batch_size`"),
        ({"repeats": 5}, "`repeats` must be at least 6"),
        ({"max_sequences_per_pack": 17, "max_seq_length": 16}, "`max_sequences_per_pack` must be at most"),
    ],
)
def test_mistakes_in_flags_are_told(flags, message):
    with pytest.raises(InputError, match=message):
        SpeedUpConfig(**flags)


def test_rows_longer_than_the_model_are_refused():
    with pytest.raises(InputError, match=r"at most max_position_embeddings=24\. Received: 32"):
        make_data(SpeedUpConfig(**NEEDS | {"max_seq_length": 32}), CONFIG)
