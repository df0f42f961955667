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
from bert_packed.runs.run_summary import estimate_step_seconds
from bert_packed.schema import PackSpec
from bert_packed.training.metrics_log import eval_columns, train_columns

COMPILING = ", and half a minute or more to compile"
CONFIG = ModelConfig(
    vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)
FLOPS = functools.partial(count_flops, PRETRAINING, CONFIG)


def test_flops_of_a_step():
    spec = PackSpec(16, 3, 5)
    # one pack takes these multiply-adds, layer by layer
    per_block = [16 * 8 * 8] * 4 + [16 * 16 * 8] * 2 + [16 * 8 * 32] * 2
    head = [5 * 8 * 8, 5 * 8 * 11]
    flops = 3 * 2 * 4 * (2 * sum(per_block) + sum(head))
    # What the matrix products leave out comes on top
    assert estimate_step_seconds(FLOPS, spec, 4, 1e6) == pytest.approx(1.5 * flops / 1e6)


def test_the_machine_is_as_fast_as_its_best_product(monkeypatch):
    clock = Clock()
    product = clock.taking([50, 4, 0.5, 0.25], result=np.zeros((1, 1)))  # the first compiles
    monkeypatch.setattr(run_summary, "time", clock)
    monkeypatch.setattr(run_summary, "compiled", lambda function: product)
    # a product of side 1024 is 1024 ** 3 multiplications, and as many additions
    assert run_summary.measured_flops_per_second(repeats=3) == 2 * 1024**3 / 0.25


def test_a_fast_machine_is_timed_on_a_larger_product(monkeypatch):
    clock, sides = Clock(), []
    products = {
        1024: clock.taking([9, 1e-4, 1e-3], result=np.zeros((1, 1))),
        2048: clock.taking([9, 3e-3, 4e-3], result=np.zeros((1, 1))),
    }

    def product(matrix):
        sides.append((len(matrix), str(matrix.dtype).rpartition("'")[0].rpartition("'")[2] or matrix.dtype))
        return products[len(matrix)](matrix)

    monkeypatch.setattr(run_summary, "time", clock)
    monkeypatch.setattr(run_summary, "compiled", lambda function: product)
    rate = run_summary.measured_flops_per_second(repeats=2, dtype="bfloat16")
    assert rate == pytest.approx(2 * 2048**3 / 3e-3)
    assert [side for side, _ in sides] == [1024] * 3 + [2048] * 3
    assert {str(dtype) for _, dtype in sides} == {"bfloat16"}


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
    text = run_summary.describe_run(config, CONFIG, data_of(1.5), "dense")
    assert text.splitlines() == [
        "batch      6 packs a step (train_batch_size), 2 at once: about 9.0 sequences (packing factor 1.500)",
        "model      mine.json: 2 layers of width 8, vocabulary 11",
        "attention  dense",
        "precision  mixed_bfloat16",
        "data       1,234 packs of 16 tokens, up to 3 sequences and 5 predictions each",
        "vocabulary not found; --vocab_file names it",
    ]
    known = SimpleNamespace(**{**vars(data_of(1.5)), "vocabulary": SimpleNamespace(path="a/vocab.txt")})
    assert run_summary.describe_run(config, CONFIG, known, "dense").endswith("\nvocabulary a/vocab.txt")
    growing = dataclasses.replace(config, initial_batch_size=2, batch_warmup_steps=1500)
    masked = SimpleNamespace(**{**vars(data_of(1.5)), "masking": SimpleNamespace(vocab_size=30522)})
    assert run_summary.describe_run(growing, CONFIG, masked, "dense").splitlines()[-2:] == [
        "grows      from 2 packs in the first step, over 1,500 steps",
        "masks      drawn again in every epoch, of 30,522 tokens",
    ]
    broken = ablate(CONFIG, "no_attention_mask")
    first, second, *_ = run_summary.describe_run(config, broken, data_of(None), "dense").splitlines()
    assert second == "ABLATION   no_attention_mask: PACKING IS BROKEN ON PURPOSE IN THIS RUN"
    assert first.endswith(
        "at once: an unknown number of sequences, since no manifest.json is beside the records"
    )


@pytest.mark.parametrize(("seconds", "is_long"), [(30.0, False), (31.0, True)])
def test_the_cost_is_that_of_all_steps(monkeypatch, seconds, is_long):
    asked = []
    monkeypatch.setattr(run_summary, "estimate_step_seconds", lambda *of: asked.append(of) or seconds)
    config = PretrainingConfig(
        input_file="-", output_dir="-", train_batch_size=6, num_train_steps=240, num_warmup_steps=239
    )
    first, *more = run_summary.describe_cost(config, CONFIG, FLOPS, data_of(2.0), 1e9).splitlines()
    assert asked == [(FLOPS, PackSpec(16, 3, 5), 6, 1e9)]
    whole = {30.0: "2 h", 31.0: "2.1 h"}[seconds]
    assert (
        first
        == f"cost       about {seconds:.0f} s a step on this machine, about {whole} for 240 steps" + COMPILING
    )
    assert bool(more) == is_long and all("to shrink a step" in line for line in more)
    # 60 steps of 2 packs and 60 of 4 before those of 6: 120 x 6 + 60 x 4 + 60 x 2 = 180 x 6
    growth = {"initial_batch_size": 2, "micro_batch_size": 2, "batch_warmup_steps": 120}
    growing = dataclasses.replace(config, **growth)
    (line, *_) = run_summary.describe_cost(growing, CONFIG, FLOPS, data_of(2.0), 1e9).splitlines()
    whole = {30.0: "90 min", 31.0: "93 min"}[seconds]
    assert (
        line
        == f"cost       about {seconds:.0f} s a step on this machine, about {whole} for 240 steps" + COMPILING
    )
    longer = dataclasses.replace(config, num_warmup_steps=960)
    *_, last = run_summary.describe_cost(longer, CONFIG, FLOPS, data_of(2.0), 1e9).splitlines()
    assert last.startswith("warm-up    is as long as the run: the learning rate ends at 25% of its peak")


def test_the_last_figures_are_those_of_the_last_rows(tmp_path):
    objective = pretraining_objective("per_sequence")
    trained, held_out = train_columns(objective), eval_columns(objective)
    for name, columns, steps in (("metrics", trained, (1, 5)), ("eval_metrics", held_out, (1, 3))):
        lines = [",".join(columns)]
        lines += [
            ",".join([str(step), *(str(step + place / 8) for place in range(1, len(columns)))])
            for step in steps
        ]
        (tmp_path / f"{name}.csv").write_text("".join(f"{line}\n" for line in lines))
    names = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "mlm_token_accuracy", "nsp_accuracy")
    assert objective.figures == names
    train, evaluated = run_summary.last_figures(tmp_path, names)
    figures = {name: place / 8 for place, name in enumerate(names, 1)}
    assert train == {"data": "train", "step": 5, **{name: 5 + value for name, value in figures.items()}}
    assert evaluated == {"data": "eval", "step": 3, **{name: 3 + value for name, value in figures.items()}}
    (tmp_path / "eval_metrics.csv").unlink()
    assert run_summary.last_figures(tmp_path, names) == [train]


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
    # each takes one step to compile, then they are interleaved
    names, order = ["unpacked", "packed"], [(0, 1), (0, 1), (1, -1), (0, 1)]
    assert calls == [(name, batch) for batch, step in order for name in names[::step]]
    # medians are 2 s and 2.5 s for 4 and 8 sequences
    columns = ("data", "packing_factor", "seconds_per_step", "sequences_per_second", "speed_up")
    assert [tuple(row) for row in rows] == [columns, columns]
    assert [tuple(row.values()) for row in rows] == [
        ("unpacked", 1.0, 2.0, 2.0, 1.0),
        ("packed", 2.0, 2.5, pytest.approx(3.2), pytest.approx(1.6)),
    ]
