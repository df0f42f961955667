"""Overhead: the two sides differ in the part alone, and what it adds is of the time without it."""

import dataclasses

import numpy as np
import pytest
from benchmark_command import config_class, run_benchmark, tables_of, write_config
from next_tokens import CONFIG as MAMBA
from packs import VOCAB_SIZE
from tiny import CONFIG, write_data

from benchmarks import mamba_operators, overhead
from benchmarks.overhead import WITH, WITHOUT
from bert_packed.architectures.registry import config_json
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json
from bert_packed.text import tokenization
from bert_packed.training import backend


def test_what_is_added_is_of_the_time_without():
    seconds = {WITH: [3.0, 6.0, 2.0], WITHOUT: [2.0, 5.0, 2.0]}
    row = overhead.overhead_row("training step", seconds)
    assert (row["with, s"], row["without, s"]) == (3.0, 2.0)
    assert row["added, %"] == pytest.approx(20.0) and row["at most, %"] == 2.0
    assert overhead.overhead_row("forward", seconds)["at most, %"] is None


@pytest.fixture
def uncompiled_programs(monkeypatch):
    """Tiny programs compile for longer than they run."""
    for module in (backend, mamba_operators):
        monkeypatch.setattr(module, "compiled", lambda function, _=None: function)


def test_the_programs_differ_in_the_mask_alone(uncompiled_programs):
    """With a mask, a sequence's result does not change with its neighbours by a bit; without it, it does."""
    assert overhead.attention_inputs(CONFIG, 2, 20)[1].tolist() == [[1] * 10 + [2] * 6 + [3] * 3 + [0]] * 2
    hidden, ids = overhead.attention_inputs(CONFIG, 2, 24)
    assert hidden.shape == (2, 24, 16) and hidden.dtype == np.float32
    others = np.where((ids == 1)[..., None], hidden, hidden[::-1, ::-1])
    for has_mask in (True, False):
        before, after = (
            overhead.attention_programs(CONFIG, has_mask, values, ids) for values in (hidden, others)
        )
        for name in before:
            moved = np.abs(before[name](0) - after[name](0))[ids == 1].max()
            assert moved == 0 if has_mask else moved > 1e-2, (name, has_mask)
    # One sequence a row: the mask hides nothing
    masked, plain = (
        overhead.attention_programs(CONFIG, has_mask, hidden, np.ones_like(ids)) for has_mask in (True, False)
    )
    for name in masked:
        np.testing.assert_allclose(masked[name](0), plain[name](0), atol=1e-5)


def test_both_goes_backward(uncompiled_programs):
    """Along a direction the gradient is the change of the weighted sum of the output."""
    hidden, ids = overhead.attention_inputs(CONFIG, 1, 12)
    weights = np.random.default_rng(1).normal(size=hidden.shape).astype(np.float32)
    direction, step = np.random.default_rng(2).normal(size=hidden.shape).astype(np.float32), 1e-2
    moved = [
        overhead.attention_programs(CONFIG, True, hidden + sign * step * direction, ids)["forward"](0)
        for sign in (1, -1)
    ]
    gradient = overhead.attention_programs(CONFIG, True, hidden, ids)["forward and backward"](0)
    slope = ((moved[0] - moved[1]) * weights).sum() / (2 * step)
    assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-2)


@pytest.mark.slow
def test_both_sides_of_fresh_masks_have_the_same_packs_and_other_masks(tmp_path, uncompiled):
    write_data(tmp_path)
    words = (*tokenization.SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCAB_SIZE - 5)))
    tokenization.save_vocab(tokenization.Vocabulary(words), tmp_path / "vocab.txt")
    flags = {
        "of": "fresh_masks",
        "input_file": f"{tmp_path}/*.tfrecord",
        "vocab_file": f"{tmp_path}/vocab.txt",
        "bert_config_file": f"{tmp_path}/bert_config.json",
        "micro_batch_size": 2,
    }
    engine, batches = overhead.masked_batches(config_class(overhead)(**flags), str(tmp_path / "run"))
    assert engine._micro_batch_size == 2
    for _ in range(3):
        dynamic, static = next(batches[WITH]), next(batches[WITHOUT])
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
    (row,) = tables_of("overhead", tmp_path, repeats=1, **flags)["fresh_masks"]
    assert row["of"] == "training step" and row["with, s"] > 0


@pytest.mark.both_backends
def test_without_restarts_nothing_is_selected(monkeypatch, uncompiled_programs, uncompiled):
    """And with them the model and the operators are as they are."""
    calls, made = [], []
    monkeypatch.setattr("benchmarks.overhead.build_engine", lambda config: made.append(config) or config)
    where = mamba_operators.ops.where
    monkeypatch.setattr(mamba_operators.ops, "where", lambda *of: calls.append(1) or where(*of))
    pairs = overhead.restart_pairs(MAMBA, 2, 16)
    assert [config.ablation_no_position_reset for config in made] == [False, True]
    for operator in mamba_operators.OPERATORS:
        found = {}
        for way, run_way in pairs[f"{operator}, forward and backward"].items():
            calls.clear()
            run_way(0)
            found[way] = len(calls)
        assert found[WITH] >= 3 and found[WITHOUT] == 0


@pytest.mark.slow
def test_the_commands(tmp_path, uncompiled_programs, uncompiled):
    config = write_config(tmp_path / "config.json", max_position_embeddings=16)
    flags = {"bert_config_file": config, "max_seq_length": 16, "batch_size": 1, "repeats": 1}
    rows = tables_of("overhead", tmp_path, **flags)["attention_mask"]
    assert [row["of"] for row in rows] == ["forward", "forward and backward"]
    write_json(tmp_path / "mamba.json", config_json(dataclasses.replace(MAMBA, num_hidden_layers=1)))
    flags |= {"of": "restarts", "bert_config_file": tmp_path / "mamba.json"}
    first, *operators = tables_of("overhead", tmp_path, **flags)["restarts"]
    assert first["of"] == "training step" and len(operators) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"of": "fresh_masks"}, "`input_file` must be given with of=fresh_masks"),
        (
            {"batch_size": 4, "micro_batch_size": 3, "of": "fresh_masks", "input_file": "x"},
            "`micro_batch_size`",
        ),
    ],
)
def test_mistakes_in_flags(flags, message):
    with pytest.raises(InputError, match=message):
        config_class(overhead)(**flags)


def test_a_part_needs_its_kind_of_model(capsys):
    assert run_benchmark("overhead", of="restarts", bert_config_file="bert-tiny") == 2
    assert "must be a Mamba with of=restarts" in capsys.readouterr().err
    assert run_benchmark("overhead", bert_config_file="mamba-tiny") == 2
