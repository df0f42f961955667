"""What is timed are the batches of runs that differ in their masks alone, under one step."""

import json

import numpy as np
import pytest
from packs import VOCAB_SIZE
from tiny import write_data

from benchmarks import masking_cost
from benchmarks.masking_cost import BenchmarkConfig, measure, read
from bert_packed.core.settings import InputError
from bert_packed.runs import interleaved_timing
from bert_packed.text import tokenization


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    words = (*tokenization.SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCAB_SIZE - 5)))
    tokenization.save_vocab(tokenization.Vocabulary(words), folder / "vocab.txt")
    return BenchmarkConfig(
        input_file=f"{folder}/*.tfrecord",
        vocab_file=f"{folder}/vocab.txt",
        bert_config_file=f"{folder}/bert_config.json",
        train_batch_size=4,
        micro_batch_size=2,
    )


def test_both_ways_have_the_same_packs_and_other_masks(config, tmp_path):
    engine, batches = read(config, str(tmp_path))
    for _ in range(3):
        static, dynamic = (next(batches[name]) for name in ("static", "dynamic"))
        assert len(static["token_ids"]) == 4
        for name in ("sequence_ids", "position_ids", "prediction_sequences"):
            np.testing.assert_array_equal(static[name], dynamic[name])
        assert not np.array_equal(static["prediction_positions"], dynamic["prediction_positions"])
        unmasked = []
        for batch in (static, dynamic):
            tokens = batch["token_ids"].copy()
            rows, places = np.nonzero(batch["prediction_sequences"])
            tokens[rows, batch["prediction_positions"][rows, places]] = batch["prediction_ids"][rows, places]
            unmasked.append(tokens)
        np.testing.assert_array_equal(*unmasked)
    assert engine._micro_batch_size == 2


def test_the_cost_is_the_median_of_neighbouring_turns(monkeypatch):
    stepped = []

    class Engine:
        def train_step(self, batch):
            stepped.append(batch)
            return {"num_sequences": 1.0}

    def in_turns(ways, num_repeats):
        for name in ways:
            ways[name](0)
        assert num_repeats == 7
        return {
            "static": [1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 4.0],
            "dynamic": [1.0, 2.0, 1.02, 1.02, 1.02, 0.5, 8.0],
        }

    monkeypatch.setattr(interleaved_timing, "time_interleaved", in_turns)
    row = measure(Engine(), {"static": iter("s"), "dynamic": iter("d")}, 7)
    assert stepped == ["s", "d"]
    assert row == {
        "static, s": 1.0,
        "dynamic, s": 1.02,
        "cost, %": pytest.approx(2.0),
        "from": -50.0,
        "to": 100.0,
        "asked": 2.0,
    }


def test_the_command_prints_its_table(config, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(masking_cost, "read", lambda *_: ("engine", "batches"))
    monkeypatch.setattr(masking_cost, "measure", lambda *given: {"given": list(given)})
    made = BenchmarkConfig(input_file="x", repeats=3, json=str(tmp_path / "cost.json"))
    masking_cost.main(made)
    assert json.loads((tmp_path / "cost.json").read_text()) == [{"given": ["engine", "batches", 3]}]
    assert "CPU: " in capsys.readouterr().out


def test_mistakes_are_told():
    with pytest.raises(InputError, match="`input_file` must be given"):
        BenchmarkConfig()
    with pytest.raises(InputError, match="`micro_batch_size` must"):
        BenchmarkConfig(input_file="x", train_batch_size=4, micro_batch_size=3)
