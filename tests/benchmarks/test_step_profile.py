"""A step's instructions, with their work and time, beside the machine's rates and the limits by them."""

import math
import types

import numpy as np
import pytest
from benchmark_command import is_png, tables_of, write_config
from tiny import CONFIG

from benchmarks import machine_rates, step_instructions, step_memory, step_profile
from benchmarks.machine_rates import Rates
from benchmarks.step_instructions import COPIES, ELEMENTWISE, PRODUCTS, SUMS, HandingOut, Work, core_seconds
from bert_packed.architectures.bert.model import count_flops
from bert_packed.architectures.registry import PRETRAINING
from bert_packed.core.settings import InputError

PROGRAM = """HloModule jit_step

%summed (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.0 = f32[] add(%a, %b)
}

%fused_product (p: f32[4,3], q: f32[3,5]) -> f32[4,5] {
  %p = f32[4,3]{1,0} parameter(0)
  %q = f32[3,5]{1,0} parameter(1)
  %dot.1 = f32[4,5]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %tanh.1 = f32[4,5]{1,0} tanh(%dot.1)
}

%fused_mixed (m: f32[4,5]) -> f32[4,5] {
  %m = f32[4,5]{1,0} parameter(0)
  %moved = f32[4,5]{1,0} copy(%m)
  ROOT %scaled = f32[4,5]{1,0} multiply(%moved, %moved)
}

%body (y: f32[3,5]) -> f32[3,5] {
  %y = f32[3,5]{1,0} parameter(0)
  ROOT %squared = f32[3,3]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (x: f32[4,3], w: f32[3,5]) -> f32[5] {
  %x = f32[4,3]{1,0} parameter(0)
  %w = f32[3,5]{1,0} parameter(1)
  %named = f32[4,5]{1,0} fusion(%x, %w), calls=%fused_product, metadata={op_name="layer_0/attention/dot"}
  %turned = f32[5,4]{1,0} transpose(%named), dimensions={1,0}
  %wide = f32[4,5]{1,0} exponential(%named), metadata={op_name="layer_0/feed_forward/exp"}
  %batched = f32[2,4,5]{2,1,0} dot(%x, %w), lhs_contracting_dims={0,1}, metadata={op_name="predictions/dot"}
  %mixed = f32[4,5]{1,0} fusion(%wide), calls=%fused_mixed, metadata={op_name="embeddings/mul"}
  %zero = f32[] constant(0)
  %looped = f32[3,5]{1,0} while(%w), body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %total = f32[5]{0} reduce(%wide, %zero), to_apply=%summed, metadata={op_name="lamb/sum"}
}
"""


def test_instructions_have_part_kind_and_work():
    work = step_instructions.read_work(PROGRAM)
    assert work["named"] == Work("attention", PRODUCTS, 2 * 4 * 5 * 3, 4 * (12 + 15 + 20), 20)
    assert work["turned"] == Work("attention", COPIES, 0, 4 * (20 + 20))  # unnamed: as what it takes
    assert work["wide"] == Work("feed-forward", ELEMENTWISE, 0, 4 * (20 + 20), 20)
    assert work["batched"] == Work("vocabulary logits", PRODUCTS, 2 * 40 * 12, 4 * (12 + 15 + 40))
    assert work["total"] == Work("optimizer", SUMS, 0, 4 * (20 + 1 + 5))
    assert work["mixed"] == Work("embeddings", ELEMENTWISE, 0, 4 * (20 + 20))
    squared = Work("losses and the rest", PRODUCTS, 7 * 2 * 9 * 5, 7 * 4 * (15 + 15 + 9))
    assert work["squared"] == squared  # in a loop of seven rounds
    assert not {"dot.1", "tanh.1", "looped"} & work.keys()


def test_time_inside_is_not_counted_outside():
    events = [(0, 10, "a"), (2, 5, "b"), (6, 7, "c"), (6.5, 6.75, "b"), (10, 12, "a"), (20, 21, "c")]
    assert core_seconds([events]) == {"a": 8, "b": 3.25, "c": 1.75}
    assert core_seconds([]) == {}


def test_tasks_count_for_the_instruction_that_handed_them_out():
    running = 1  # the task of the whole program: nothing hands it out, and its own time is nobody's
    first = [(0, 100, running), (0, 10, "a"), (1, 1, HandingOut(7)), (4, 6, "b"), (5, 5, HandingOut(8))]
    second = [(2, 9, 7), (3, 3, HandingOut(9)), (5, 6, "b"), (20, 24, 8), (21, 23, "c")]
    third = [(30, 30.5, 9), (40, 41, "c"), (50, 60, 5)]
    expected = {"a": (10 - 2) + (7 - 1) + 0.5, "b": 2 + 1 + (4 - 2), "c": 2 + 1}
    for threads in ([first, second, third], [third, second, first]):
        assert core_seconds(threads) == expected


def test_a_trace_has_calls_and_tasks(tmp_path):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add()
    titles = ["Record", "StartRegion", "StopRegion"]
    titles = ["", *(f"ThreadpoolListener::{title}" for title in titles), "dot.1", "exp.2", "other"]
    for number, title in enumerate(titles):
        plane.event_metadata[number].name = title
    for number, key in enumerate(("_p", "_c", "_ct")):
        plane.stat_metadata[number].name = key

    def add(line, title, start, length=0, **stats):
        event = line.events.add(metadata_id=titles.index(title), offset_ps=start, duration_ps=length)
        event.stats.add(metadata_id=2, uint64_value=15)
        for key, value in stats.items():
            event.stats.add(metadata_id=("_p", "_c").index(key), uint64_value=value)

    record, begin, stop = titles[1:4]
    first, second = plane.lines.add(), plane.lines.add()
    add(second, begin, 100, _c=3)  # written in no order
    add(second, stop, 900)
    add(second, begin, 200, _c=4)
    add(second, stop, 500)
    add(second, stop, 50)  # of a task that began before the trace
    add(first, "dot.1", 0, 1000)
    add(first, "exp.2", 2000, 3000)
    add(first, "other", 2500, 100)
    add(first, record, 10, _p=3)
    add(first, record, 2010, _p=4)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "host.xplane.pb").write_bytes(space.SerializeToString())
    seconds = core_seconds(step_instructions.read_threads(tmp_path, {"dot.1", "exp.2"}))
    assert seconds == pytest.approx({"dot.1": (1000 + 500) / 1e12, "exp.2": (3000 + 300) / 1e12})
    with pytest.raises(InputError, match="must hold XLA's instructions"):
        step_instructions.read_threads(tmp_path, {"dot.2"})


def test_a_group_is_limited_by_its_longest_bound():
    rates = Rates(products=6e9, memory=4e9, exponentials=2e9)
    expected = {
        ("attention", PRODUCTS): {"instructions": 2, "ms": 4, "share": 0.2, "GFLOP/s": 1, "GB/s": None}
        | {"operations a byte": 2000, "limited by": "products", "least ms": 4 / 6, "reached": 1 / 6},
        ("optimizer", SUMS): {"instructions": 1, "ms": 12, "share": 0.6, "GFLOP/s": None, "GB/s": 0.5}
        | {"operations a byte": None, "limited by": "memory", "least ms": 1.5, "reached": 0.125},
        ("feed-forward", ELEMENTWISE): {"limited by": "exponentials", "least ms": 2, "reached": 0.5},
        ("all", ""): {"instructions": 4, "ms": 20, "share": 1},
    }
    assert rates.least_seconds(3e9, 1e9, 1e9) == {"products": 0.5, "memory": 0.25, "exponentials": 0.5}
    work = {
        "a": Work("attention", PRODUCTS, 3_000_000, 1_000),
        "b": Work("attention", PRODUCTS, 1_000_000, 1_000),
        "c": Work("optimizer", SUMS, 0, 6_000_000),
        "d": Work("feed-forward", ELEMENTWISE, 0, 1_000, 4_000_000),
        "never": Work("optimizer", SUMS, 0, 1),
    }
    rows = step_profile.profile_rows(work, {"a": 0.006, "b": 0.002, "c": 0.024, "d": 0.008}, 2, rates)
    assert [row["part"] for row in rows] == ["optimizer", "attention", "feed-forward", *["all"] * 4]
    found = {(row["part"], row["what"]): row for row in rows}
    for key, columns in expected.items():
        assert {name: found[key][name] for name in columns} == pytest.approx(columns), key


@pytest.fixture
def small_rates(monkeypatch):
    for name, value in (("NUM_MOVED", 1 << 10), ("NUM_EXPONENTIALS", 1 << 10), ("SQUARE", 4), ("PAUSE", 0)):
        monkeypatch.setattr(machine_rates, name, value)


def test_rates_are_work_over_time(small_rates, monkeypatch):
    """Eight products of 2 x 8 x 2 x 16 operations in half a second; torch takes a quarter of it."""

    def timed(ways, num_repeats):
        for way in ways.values():
            way(0)
        return {name: [0.25, 0.5, 4.0] if "torch" not in name else [0.125, 0.125, 1.0] for name in ways}

    multiplied = []
    torch = types.SimpleNamespace(randn=lambda *of: of, mm=lambda *of: multiplied.append(of))
    monkeypatch.setattr(machine_rates, "time_interleaved", timed)
    monkeypatch.setattr("benchmarks.peers.transformers_models.import_torch", lambda: (torch, None))
    rates, rows = machine_rates.measure_rates({(8, 2, 16)}, 3, with_torch=True)
    assert rates == Rates(8 * 512 / 0.5, memory=3 * 4096 / 0.5, exponentials=8 * 1024 / 0.5)
    assert multiplied == [((4, 4), (4, 4))] * 8 + [((8, 2), (2, 16))] * 8
    square, product, moved, exponentials = rows
    assert (square["what"], square["here"], square["torch"]) == ("product 4 x 4 x 4", 2.048e-6, 8.192e-6)
    assert (product["what"], product["here"], product["of torch's"]) == ("product 8 x 2 x 16", 8.192e-6, 0.25)
    assert (moved["here"], moved["torch"], exponentials["here"]) == (2.4576e-5, None, 1.6384e-5)


@pytest.mark.both_backends
@pytest.mark.parametrize("shape", [(4, 3, 8), (8, 3, 4)])
def test_a_chain_of_products_is_computed(monkeypatch, shape):
    kept = []
    monkeypatch.setattr(machine_rates.ops, "convert_to_numpy", lambda value: kept.append(float(value)))
    machine_rates.product_program(*shape)(0)
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(rows, depth)), rng.normal(size=(depth, columns))
    total = 0.0
    for _ in range(8):
        corner = (left @ right)[0, 0]
        total += corner
        left, right = (left + corner, right) if rows < columns else (left, right + corner)
    assert kept == [pytest.approx(total, rel=1e-3)]


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_traced_step_has_the_products_of_the_model(tmp_path, monkeypatch, small_rates):
    monkeypatch.setattr(step_profile, "num_cores", lambda: 1000)
    config = write_config(tmp_path / "config.json", max_position_embeddings=32, hidden_dropout_prob=0.1)
    sizes = {"batch_size": 4, "micro_batch_size": 2, "max_seq_length": 32, "repeats": 2}
    picture = tmp_path / "profile.png"
    tables = tables_of("step_profile", tmp_path, bert_config_file=config, picture=picture, **sizes)
    assert is_png(picture) and "product 64 x 16 x 16" in {row["what"] for row in tables["rates"]}
    parts = [row for row in tables["step"] if row["part"] != "all"]
    assert {"attention", "feed-forward", "embeddings", "optimizer"} <= {row["part"] for row in parts}
    whole = tables["step"][-1]
    assert whole["ms"] == pytest.approx(math.fsum(row["ms"] for row in parts))
    blocks = [row for row in parts if row["GFLOP/s"] and row["part"] in ("attention", "feed-forward")]
    counts = {"num_tokens": 4 * 32, "num_pairs": 4 * 32 * 32, "num_predictions": 0, "num_sequences": 0}
    # milliseconds at 1e9 a second; every round of the loop over micro-batches counts
    found = 1e6 * sum(row["ms"] * row["GFLOP/s"] for row in blocks)
    assert found == pytest.approx(count_flops(PRETRAINING, CONFIG, counts))


@pytest.mark.slow
@pytest.mark.both_backends
def test_temporaries_of_a_step(tmp_path):
    config = write_config(tmp_path / "config.json", num_hidden_layers=1, max_position_embeddings=32)
    flags = {"bert_config_file": config, "batch_size": 4, "micro_batch_size": 2, "lengths": "16,32"}
    short, long = tables_of("step_memory", tmp_path, **flags)["memory"]
    assert (short["tokens"], long["tokens"], long["process, MiB"]) == (16, 32, None)
    assert long["temporaries, MiB"] > short["temporaries, MiB"]
    assert long["KiB a token"] == pytest.approx(long["temporaries, MiB"] * 1024 / (2 * 32))


def test_memory_is_by_the_tokens_that_are_computed_at_once():
    for micro, by_token in ((0, 4.0), (2, 8.0)):
        config = step_memory.MemoryConfig(batch_size=4, micro_batch_size=micro)
        row = step_memory.memory_row(64, config, 1 << 20, 3 << 20)
        assert (row["temporaries, MiB"], row["KiB a token"], row["process, MiB"]) == (1, by_token, 3)
    assert step_memory.memory_row(64, config, None, None)["KiB a token"] is None


@pytest.mark.slow
@pytest.mark.both_backends
def test_memory_of_a_mamba_grows_as_the_length_does(tmp_path):
    """Compiled, at full optimisation: states are kept at the borders of chunks alone."""
    flags = {"bert_config_file": "mamba-tiny", "vocab_size": 64, "batch_size": 1, "lengths": "256,1024"}
    first, last = tables_of("step_memory", tmp_path, **flags)["memory"]
    assert last["temporaries, MiB"] / first["temporaries, MiB"] < 4.4
