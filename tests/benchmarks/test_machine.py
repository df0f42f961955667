"""The parts of a step are all of its products, and rates and bounds are what their formulas say."""

import dataclasses
import json
import types

import keras
import numpy as np
import pytest
from keras import ops
from scipy.special import softmax

from benchmarks import machine, machine_parts, machine_rates, step_parts
from benchmarks.machine_rates import Rates
from bert_packed.config import ModelConfig
from bert_packed.core.settings import InputError
from bert_packed.models import attention_products, cpu_forms, linear
from bert_packed.models.flops import bert_flops
from bert_packed.training.engines.functional import compiled

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
    type_vocab_size=2,
)
B, S, P = 2, 16, 5
BATCH = {
    "sequence_ids": np.repeat([[1, 2, 0]], B, axis=0).repeat([7, 6, 3], axis=1).astype(np.int32),
    "token_ids": np.arange(B * S, dtype=np.int32).reshape(B, S) % 40,
    "token_type_ids": np.zeros((B, S), np.int32),
    "position_ids": np.tile(np.arange(S, dtype=np.int32), (B, 1)),
}


@pytest.fixture(scope="module")
def parts():
    return machine_parts.make_parts(CONFIG, BATCH, P)


def test_the_parts_have_the_products_of_a_step(parts):
    counts = {"num_tokens": B * S, "num_pairs": B * S * S, "num_predictions": B * P, "num_sequences": 0}
    # The head's transform, of a few rows, is in no part
    expected = bert_flops(CONFIG, counts) - 6 * CONFIG.hidden_size**2 * B * P
    assert sum(part.times * part.flops for part in parts) == expected


def test_a_part_counts_its_bytes(parts):
    by_name = {part.name: part for part in parts}
    # [32, 8] by [8, 24] and a bias of 24 to [32, 24]: each read or written, and the gradient of each
    assert by_name["feed-forward, in"].num_bytes == 4 * 2 * (32 * 8 + 8 * 24 + 24 + 32 * 24)
    assert by_name["mask, softmax, dropout"].num_bytes == 4 * 2 * 2 * (B * 2 * S * S)
    assert by_name["mask, softmax, dropout"].exponentials == B * 2 * S * S
    assert by_name["masked-LM loss"].exponentials == B * P * 40
    assert by_name["dropout, sum, norm"].times == 6


@pytest.mark.both_backends
@pytest.mark.parametrize(
    ("name", "counts"),  # of what is kept apart, under TensorFlow and under JAX
    [
        ("scores of attention", (2, 2)),
        ("values of attention", (2, 0)),
        ("feed-forward, in", (0, 1)),
        ("feed-forward, out", (0, 2)),
        ("vocabulary logits", (0, 0)),
    ],
)
def test_a_part_takes_the_forms_for_cpus_as_the_step_does(monkeypatch, name, counts):
    kept, kept_apart = [], cpu_forms.kept_apart
    for module in (attention_products, linear):
        monkeypatch.setattr(module, "kept_apart", lambda one: kept.append(one) or kept_apart(one))
    (part,) = [part for part in machine_parts.make_parts(CONFIG, BATCH, P) if part.name == name]
    part.run(0)
    assert len(kept) == counts[keras.backend.backend() == "jax"]


@pytest.mark.both_backends
def test_every_part_runs(parts, monkeypatch):
    waited = []
    monkeypatch.setattr(machine_parts.ops, "convert_to_numpy", lambda value: waited.append(np.array(value)))
    for part in parts:
        part.run(0)
    assert len(waited) == 2 * len(parts)
    assert all(np.isfinite(value).all() and value.any() for value in waited)


@pytest.mark.both_backends
def test_the_part_of_attention_is_a_masked_softmax_and_its_gradient(monkeypatch):
    kept = []

    def keeping(function):
        program = compiled(function)
        return lambda *given: kept.append((given, program(*given))) or kept[-1][1]

    monkeypatch.setattr(machine_parts, "compiled", keeping)
    config = dataclasses.replace(CONFIG, attention_probs_dropout_prob=0.0)
    (part,) = (part for part in machine_parts.make_parts(config, BATCH, P) if "softmax" in part.name)
    part.run(0)
    (((scores,), factors), ((gradient,), result)) = kept[0]
    ids = BATCH["sequence_ids"]
    mask, factors = (ids[:, :, None] == ids[:, None, :])[:, None], np.array(factors, np.float64)
    expected = softmax(np.where(mask, np.array(scores, np.float64), -np.inf), axis=-1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    shared = np.sum(expected * factors, axis=-1, keepdims=True)
    np.testing.assert_allclose(gradient, expected * (factors - shared), rtol=1e-4, atol=1e-6)


@pytest.mark.both_backends
def test_the_optimizer_moves_seven_arrays_of_weights():
    from benchmarks.benchmark_engine import build_engine

    engine = build_engine(CONFIG)
    before = [ops.convert_to_numpy(weight) for weight in engine.model.trainable_variables]
    part = machine_parts.optimizer_part(engine)
    part.run(0)
    assert part.num_bytes == 4 * 7 * sum(weight.size for weight in before)


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(machine_rates, "NUM_MOVED", 1 << 10)
    monkeypatch.setattr(machine_rates, "NUM_EXPONENTIALS", 1 << 10)
    monkeypatch.setattr(machine_rates, "SQUARE", 4)
    ran = []

    def half_seconds(ways, num_repeats, rest):
        for way in ways.values():
            way(0)
        ran.append((len(ways), num_repeats, rest))
        return {name: [0.25, 0.5, 4.0] for name in ways}

    monkeypatch.setattr(machine_rates, "time_interleaved", half_seconds)
    rates = machine_rates.measure_rates({(8, 2, 16)}, 3)
    assert ran == [(4, 3, 0.02)]
    # Eight products of 2 x 8 x 2 x 16 operations in half a second
    assert rates.by_shape == {"4 x 4 x 4": 8 * 128 / 0.5 / 1e9, "8 x 2 x 16": 8 * 512 / 0.5 / 1e9}
    assert rates.products == rates.by_shape["8 x 2 x 16"]
    assert rates.bandwidth == 3 * 4096 / 0.5 / 1e9
    assert rates.exponentials == 8 * 1024 / 0.5 / 1e9
    assert not rates.torch and not rates.of_torch


def test_torch_multiplies_beside_each_product(monkeypatch):
    monkeypatch.setattr(machine_rates, "NUM_MOVED", 1 << 10)
    monkeypatch.setattr(machine_rates, "NUM_EXPONENTIALS", 1 << 10)
    monkeypatch.setattr(machine_rates, "SQUARE", 4)
    monkeypatch.setattr(machine_rates, "_torch_products", lambda *shape: lambda _: asked.append(shape))
    asked, order = [], []

    def in_turns(ways, num_repeats, rest):
        for name, way in ways.items():
            way(0)
            order.append(name)
        times = {("here", (8, 2, 16)): [2.0, 4.0, 12.0], ("torch", (8, 2, 16)): [1.0, 3.0, 3.0]}
        return {name: times.get(name, [1.0, 1.0, 1.0]) * (num_repeats // 3) for name in ways}

    monkeypatch.setattr(machine_rates, "time_interleaved", in_turns)
    rates = machine_rates.measure_rates({(8, 2, 16)}, 3, with_torch=True)
    assert asked == [(4, 4, 4), (8, 2, 16)]
    assert order[:4] == [(who, shape) for shape in asked for who in ("here", "torch")]
    assert rates.torch == {"4 x 4 x 4": 8 * 128 / 1e9, "8 x 2 x 16": 8 * 512 / 3 / 1e9}
    assert rates.by_shape == {"4 x 4 x 4": 8 * 128 / 1e9, "8 x 2 x 16": 8 * 512 / 4 / 1e9}
    assert rates.of_torch == {"4 x 4 x 4": (1, None, None), "8 x 2 x 16": (0.5, None, None)}
    rates = machine_rates.measure_rates({(8, 2, 16)}, 6, with_torch=True)
    assert rates.of_torch["8 x 2 x 16"] == (0.5, 0.25, 0.75)


def test_torch_computes_as_many_products(monkeypatch):
    torch = types.SimpleNamespace(randn=lambda *shape: shape, mm=lambda *of: multiplied.append(of))
    multiplied = []
    monkeypatch.setattr(machine_rates, "import_torch", lambda: (torch, None))
    machine_rates._torch_products(8, 2, 16)(0)
    assert multiplied == [((8, 2), (2, 16))] * 8


@pytest.mark.both_backends
@pytest.mark.parametrize("shape", [(4, 3, 8), (8, 3, 4)])
def test_a_chain_of_products_is_computed(monkeypatch, shape):
    kept = []
    monkeypatch.setattr(machine_rates.ops, "convert_to_numpy", lambda value: kept.append(float(value)))
    machine_rates._products(*shape)(0)
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns))
    total = 0.0
    for _ in range(8):
        corner = (left @ right)[0, 0]
        total += corner
        left, right = (left + corner, right) if rows < columns else (left, right + corner)
    assert kept == [pytest.approx(total, rel=1e-3)]


def measured():
    def part(name, times, flops, exponentials, num_bytes):
        return machine_parts.Part(name, times, flops, exponentials, num_bytes, None)

    parts = [part("p", 2, 3e9, 0.0, 1e9), part("m", 1, 0.0, 1e9, 8e9), part("e", 4, 0.0, 3e9, 1e9)]
    seconds = {"p": [1.0, 2.0, 9.0], "m": [4.0], "e": [2.0]}
    of_torch = {"torch": {"1 x 2 x 3": 5.0}, "of_torch": {"1 x 2 x 3": (1.25, 1.0, 1.5)}}
    rates = Rates(6.0, 4.0, 2.0, {"1 x 2 x 3": 6.0, "4 x 2 x 3": 3.0}, **of_torch)
    return step_parts.Measured(parts, seconds, [8.0, 10.0, 30.0], rates)


def test_a_part_is_limited_by_its_longest_bound():
    rows = {row["part"]: row for row in step_parts.part_rows(measured())}
    assert [rows[name]["limited by"] for name in "pme"] == ["products", "memory", "exponentials"]
    # 2 x 3 GFLOP at 6 GFLOP/s; 8 GB at 4 GB/s; 4 x 3e9 at 2e9/s
    assert [rows[name]["ms by its bound"] for name in "pme"] == [1000, 2000, 6000]
    assert [rows[name]["ms"] for name in "pme"] == [4000, 4000, 8000]
    assert [rows[name]["share"] for name in "pme"] == [0.25, 0.25, 0.5]
    assert rows["p"]["GFLOP/s"] == 1.5
    assert rows["p"]["operations a byte"] == 3
    assert rows["m"]["GFLOP/s"] is None
    assert rows["all parts"]["ms"] == 16000
    assert rows["all parts"]["reached"] == 9 / 16
    assert rows["whole step"]["ms"] == 10000
    assert rows["whole step"]["reached"] == 0.9
    assert measured().product_bound() == 1


def test_rates_have_rows():
    rows = step_parts.rate_rows(measured())
    theirs = {"torch": 5.0, "of torch's": 1.25, "from": 1.0, "to": 1.5}
    assert rows[0] == {"what": "product 1 x 2 x 3", "here": 6.0, "unit": "GFLOP/s", **theirs}
    assert [row["here"] for row in rows] == [6.0, 3.0, 4.0, 2.0]
    assert all(row[name] is None for row in rows[1:] for name in theirs)


@pytest.mark.parametrize("micro_batch_size", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_command_measures_draws_and_writes(tmp_path, monkeypatch, capsys, micro_batch_size):
    monkeypatch.setattr(machine_rates, "NUM_MOVED", 1 << 10)
    monkeypatch.setattr(machine_rates, "SQUARE", 16)
    model = tmp_path / "config.json"
    model.write_text(
        json.dumps({**dataclasses.asdict(CONFIG), "max_position_embeddings": 32, "vocab_size": 30522})
    )
    config = machine.MachineConfig(
        bert_config_file=str(model),
        batch_size=2,
        micro_batch_size=micro_batch_size,
        max_seq_length=32,
        repeats=1,
        json=str(tmp_path / "machine.json"),
        picture=str(tmp_path / "machine.png"),
    )
    machine.main(config)
    written = json.loads((tmp_path / "machine.json").read_text())
    times = {row["part"]: row["times"] for row in written["parts"]}
    factor = 2 if micro_batch_size else 1
    assert times["projections of attention"] == 12 * factor
    assert times["optimizer"] == 1
    assert written["step"][0]["steps"] == 1
    assert (tmp_path / "machine.png").read_bytes().startswith(b"\x89PNG")
    assert "mask, softmax, dropout" in capsys.readouterr().out


def test_steps_alone(tmp_path, monkeypatch):
    model = tmp_path / "config.json"
    model.write_text(
        json.dumps({**dataclasses.asdict(CONFIG), "max_position_embeddings": 32, "vocab_size": 30522})
    )
    monkeypatch.setattr(step_parts, "make_parts", lambda *_: pytest.fail("must not be made"))
    target = tmp_path / "step.json"
    machine.main(
        machine.MachineConfig(
            bert_config_file=str(model), batch_size=2, max_seq_length=32, repeats=2, step_only=True,
            json=str(target),
        )
    )  # fmt: skip
    assert set(json.loads(target.read_text())) == {"cpu", "step"}


@pytest.mark.parametrize("reference", [False, True])
def test_every_setting_of_the_command_is_heeded(tmp_path, monkeypatch, reference):
    told, batch = {}, {"prediction_ids": np.zeros((6, P)), "token_ids": np.zeros((6, S))}

    def noting(name, answer):
        return lambda *of, **more: told.setdefault(name, (of, more)) and answer

    def times(ways, num_repeats):
        told["turns"] = num_repeats
        return {name: [1.0] for name in ways}

    part = machine_parts.Part("p", 1, 1.0, 0.0, 1.0, None, product=(4096, 2, 2))
    monkeypatch.setattr(
        step_parts, "make_batches", noting("batches", (types.SimpleNamespace(batches=[batch]), None))
    )
    monkeypatch.setattr(step_parts, "build_engine", noting("engine", object()))
    monkeypatch.setattr(step_parts, "make_parts", noting("parts", [part]))
    monkeypatch.setattr(step_parts, "optimizer_part", lambda _: dataclasses.replace(part, name="o"))
    monkeypatch.setattr(step_parts, "time_interleaved", times)
    monkeypatch.setattr(step_parts, "measure_rates", noting("rates", Rates(1.0, 1.0, 1.0, {})))
    config = machine.MachineConfig(
        batch_size=6,
        micro_batch_size=2,
        max_seq_length=32,
        max_sequences_per_pack=5,
        repeats=4,
        reference=reference,
    )
    found = step_parts.measure_step(config, CONFIG, str(tmp_path))
    # The folder, no records of one's own, tokens a pack, most sequences in one, packs a step, one step
    assert told["batches"] == ((str(tmp_path), "", 32, 5, 6, 1, CONFIG), {})
    assert told["engine"] == ((CONFIG,), {"micro_batch_size": 2})
    assert told["parts"][0][1]["token_ids"].shape == (2, S)
    assert {one.name: one.times for one in found.parts} == {"p": 3, "o": 1}
    assert told["turns"] == 4
    assert told["rates"] == (({(4096, 2, 2)}, 4, reference), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"picture": "x.png"}, r"`picture` must not be set with --step_only, .*Received: x\.png\."),
        ({"reference": True}, r"`reference` must not be set with --step_only, .*Received: True\."),
    ],
)
def test_steps_alone_have_nothing_to_draw_or_compare(change, message):
    with pytest.raises(InputError, match=message):
        machine.MachineConfig(step_only=True, **change)
