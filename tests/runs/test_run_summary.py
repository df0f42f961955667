"""Texts of a run for people: cost by a plain count, figures of logs, packed against unpacked steps."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from clock import Clock

from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.bert.model import count_flops
from bert_packed.architectures.registry import PRETRAINING, ablate
from bert_packed.core.progress import count_of, describe_duration
from bert_packed.objectives.pretraining import pretraining_objective
from bert_packed.runs import interleaved_timing, run_summary
from bert_packed.runs.interleaved_timing import Contender, compare
from bert_packed.runs.pretraining import Run
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.schema import PackSpec
from bert_packed.training import metrics_log
from bert_packed.training.metrics_log import eval_columns, train_columns

CONFIG = ModelConfig(
    vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)
FLOPS = functools.partial(count_flops, PRETRAINING, CONFIG)


def test_seconds_of_a_step_are_those_of_its_products_and_more():
    spec = PackSpec(16, 3, 5)
    # One pack takes these multiply-adds, layer by layer
    per_block = [16 * 8 * 8] * 4 + [16 * 16 * 8] * 2 + [16 * 8 * 32] * 2
    head = [5 * 8 * 8, 5 * 8 * 11]
    flops = 3 * 2 * 4 * (2 * sum(per_block) + sum(head))
    assert run_summary.estimate_step_seconds(FLOPS, spec, 4, 1e6) == pytest.approx(1.5 * flops / 1e6)


def test_the_machine_is_as_fast_as_its_best_product(monkeypatch):
    """The first call compiles, and a product that takes less than 2 ms is too small."""
    clock, sides = Clock(), []
    times = {1024: [9, 1e-4, 1e-3], 2048: [9, 3e-3, 4e-3]}
    products = {side: clock.taking(seconds, result=np.zeros((1, 1))) for side, seconds in times.items()}

    def product(matrix):
        assert "bfloat16" in str(matrix.dtype)
        sides.append(len(matrix))
        return products[len(matrix)](matrix)

    monkeypatch.setattr(run_summary, "time", clock)
    monkeypatch.setattr(run_summary, "compiled", lambda function: product)
    rate = run_summary.measured_flops_per_second(repeats=2, dtype="bfloat16")
    # A product of side n is n ** 3 multiplications, and as many additions
    assert rate == pytest.approx(2 * 2048**3 / 3e-3)
    assert sides == [1024] * 3 + [2048] * 3


@pytest.mark.parametrize(("replicas", "rate", "peak"), [(None, 2e9, 2e9), (4, 2e9, 8e9), (4, None, None)])
def test_the_peak_of_a_run_is_of_all_its_devices(replicas, rate, peak):
    """A rate of one device alone would let four look four times as busy."""
    config = PretrainingConfig(input_file="-", output_dir="-", train_batch_size=6, micro_batch_size=2)
    engine = SimpleNamespace(
        replicas=replicas and SimpleNamespace(num_whole=replicas),
        objective=pretraining_objective("per_token"),
    )
    scale = Run(config, data=data_of(1.5), model_config=CONFIG, engine=engine).scale(rate)
    assert (scale.peak_flops, scale.positions_per_step) == (peak, 6 * 16)
    sums = {"num_tokens": 3.0, "num_pairs": 9.0, "num_predictions": 1.0, "num_sequences": 1.0}
    assert scale.model_flops(sums) == FLOPS(sums)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_products_of_a_run_in_either_precision_are_measured(monkeypatch, dtype):
    for name in ("MATMUL_SIZE", "LARGEST_MATMUL"):
        monkeypatch.setattr(run_summary, name, 8)
    assert run_summary.measured_flops_per_second(repeats=2, dtype=dtype) > 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "0.034 s"), (3.21, "3.2 s"), (113, "113 s"), (150, "2.5 min"), (18000, "5 h"), (4e6, "46 days")],
)
def test_durations_for_people(seconds, text):
    assert describe_duration(seconds) == text


def test_counts_agree_with_their_nouns():
    assert [count_of(n, "pack") for n in (0, 1, 2000)] == ["0 packs", "1 pack", "2,000 packs"]


def data_of(factor):
    train = SimpleNamespace(spec=PackSpec(16, 3, 5), packing_factor=factor)
    return SimpleNamespace(train=train, num_packs=1234, masking=None, vocabulary=None)


def test_what_was_cut_is_told_where_something_was():
    assert run_summary.describe_counts({"cut": 1234, "empty": 0}) == "\n  warning: 1,234 cut"
    assert run_summary.describe_counts({"cut": 0}) == ""


def test_a_run_is_described_by_its_own_figures():
    sizes = {"train_batch_size": 6, "micro_batch_size": 2, "dtype": "mixed_bfloat16"}
    config = PretrainingConfig(input_file="-", output_dir="-", bert_config_file="mine.json", **sizes)

    def describe(config=config, model=CONFIG, factor=1.5, **known):
        data = SimpleNamespace(**vars(data_of(factor)) | known)
        return run_summary.describe_run(config, model, data, "dense").splitlines()

    assert describe() == [
        "batch      6 packs a step (train_batch_size), 2 at once: about 9.0 sequences (packing factor 1.500)",
        "model      mine.json: 2 layers of width 8, vocabulary 11",
        "attention  dense",
        "precision  mixed_bfloat16",
        "data       1,234 packs of 16 tokens, up to 3 sequences and 5 predictions each",
        "vocabulary not found; --vocab_file names it",
    ]
    growing = dataclasses.replace(config, initial_batch_size=2, batch_warmup_steps=1500)
    more = {"vocabulary": SimpleNamespace(path="a/vocab.txt"), "masking": SimpleNamespace(vocab_size=30522)}
    assert describe(growing, **more)[-3:] == [
        "vocabulary a/vocab.txt",
        "grows      from 2 packs in the first step, over 1,500 steps",
        "masks      drawn again in every epoch, of 30,522 tokens",
    ]
    first, second, *_ = describe(model=ablate(CONFIG, "no_attention_mask"), factor=None)
    assert second == "ABLATION   no_attention_mask: PACKING IS BROKEN ON PURPOSE IN THIS RUN"
    assert first.endswith(
        "at once: an unknown number of sequences, since no manifest.json is beside the records"
    )


# With growth, 60 steps of 2 packs and 60 of 4 come before those of 6: 120 x 6 + 60 x 4 + 60 x 2 = 180 x 6
GROWTH = {"initial_batch_size": 2, "micro_batch_size": 2, "batch_warmup_steps": 120}


@pytest.mark.parametrize(
    ("seconds", "changes", "whole", "more"),
    [
        (30, {}, "2 h", []),
        (31, {}, "2.1 h", ["           to shrink a step: --bert_config_file="]),
        (30, GROWTH, "90 min", []),
        (
            30,
            {"num_warmup_steps": 960},
            "2 h",
            ["warm-up    is as long as the run: the learning rate ends at 25%"],
        ),
    ],
)
def test_the_cost_is_that_of_all_steps(monkeypatch, seconds, changes, whole, more):
    asked = []
    monkeypatch.setattr(run_summary, "estimate_step_seconds", lambda *of: asked.append(of) or seconds)
    flags = {"train_batch_size": 6, "num_train_steps": 240, "num_warmup_steps": 239} | changes
    config = PretrainingConfig(input_file="-", output_dir="-", **flags)
    first, *found = run_summary.describe_cost(config, CONFIG, FLOPS, data_of(2.0), 1e9).splitlines()
    assert asked == [(FLOPS, PackSpec(16, 3, 5), 6, 1e9)]
    assert first == (
        f"cost       about {seconds} s a step on this machine, about {whole} for 240 steps, "
        "and half a minute or more to compile"
    )
    assert len(found) == len(more) and all(map(str.startswith, found, more))


def test_the_last_figures_are_those_of_the_last_rows(tmp_path):
    objective = pretraining_objective("per_sequence")
    names = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "mlm_token_accuracy", "nsp_accuracy")
    assert objective.figures == names
    logs = (("metrics", train_columns, (1, 5)), ("eval_metrics", eval_columns, (1, 3)))
    for name, columns_of, steps in logs:
        columns = columns_of(objective)
        rows = [[step, *(step + place / 8 for place in range(1, len(columns)))] for step in steps]
        lines = [",".join(map(str, row)) + "\n" for row in (columns, *rows)]
        (tmp_path / f"{name}.csv").write_text("".join(lines))
    train, evaluated = metrics_log.last_figures(tmp_path, names)
    for row, data, step in ((train, "train", 5), (evaluated, "eval", 3)):
        figures = {name: step + place / 8 for place, name in enumerate(names, 1)}
        assert row == {"data": data, "step": step, **figures}
    (tmp_path / "eval_metrics.csv").unlink()
    assert metrics_log.last_figures(tmp_path, names) == [train]


def test_comparison_reports_the_ratio_of_sequences_per_second(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleaved_timing, "time", clock)
    calls = []

    def contender(name, factor, seconds):
        run = clock.taking(seconds, result={"num_sequences": 1.0})

        def take(batch):
            calls.append((name, batch))
            return run()

        return Contender(name, take, [0, 1], 4 * factor, factor)

    unpacked = contender("unpacked", 1.0, [100, 2, 9, 2])
    rows = compare([unpacked, contender("packed", 2.0, [100, 5, 2.5, 2])], num_repeats=3)
    # Each takes one step to compile, then they are interleaved
    names, order = ["unpacked", "packed"], [(0, 1), (0, 1), (1, -1), (0, 1)]
    assert calls == [(name, batch) for batch, step in order for name in names[::step]]
    # The medians are 2 s and 2.5 s for 4 and 8 sequences
    columns = ("data", "packing_factor", "seconds_per_step", "sequences_per_second", "speed_up")
    assert [tuple(row) for row in rows] == [columns, columns]
    assert [tuple(row.values()) for row in rows] == [
        ("unpacked", 1.0, 2.0, 2.0, 1.0),
        ("packed", 2.0, 2.5, pytest.approx(3.2), pytest.approx(1.6)),
    ]
