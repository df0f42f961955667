"""A step's instructions: their time on all threads, their part, kind, operations and bytes."""

import dataclasses
import json
import re

import pytest
from tiny import CONFIG

from benchmarks import benchmark_batches, benchmark_engine, instruction_times, step_profile
from benchmarks.instruction_groups import COPIES, ELEMENTWISE, PRODUCTS, SUMS, group_instructions
from benchmarks.instruction_times import HandingOut, core_seconds
from bert_packed.core.settings import InputError
from bert_packed.models.flops import bert_flops
from bert_packed.training import profiling

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
  ROOT %negate.1 = f32[4,5]{1,0} negate(%dot.1)
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
  %zero = f32[] constant(0)
  %looped = f32[3,5]{1,0} while(%w), body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %total = f32[5]{0} reduce(%wide, %zero), to_apply=%summed, metadata={op_name="lamb/sum"}
}
"""


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
    seconds = core_seconds(instruction_times.read_threads(tmp_path, {"dot.1", "exp.2"}))
    assert seconds == pytest.approx({"dot.1": (1000 + 500) / 1e12, "exp.2": (3000 + 300) / 1e12})


def test_instructions_have_part_kind_operations_and_bytes():
    groups = group_instructions(PROGRAM)
    assert groups["named"] == ("attention", PRODUCTS, 2 * 4 * 5 * 3, 4 * (12 + 15 + 20))
    assert groups["turned"] == ("attention", COPIES, 0, 4 * (20 + 20))  # unnamed: as what it takes
    assert groups["wide"] == ("feed-forward", ELEMENTWISE, 0, 4 * (20 + 20))
    assert groups["batched"] == ("vocabulary logits", PRODUCTS, 2 * 40 * 12, 4 * (12 + 15 + 40))
    assert groups["total"] == ("optimizer", SUMS, 0, 4 * (20 + 1 + 5))
    assert groups["squared"] == ("losses and the rest", PRODUCTS, 7 * 2 * 9 * 5, 7 * 4 * (15 + 15 + 9))
    assert groups["x"][0] == "losses and the rest"
    assert not {"dot.1", "negate.1", "looped"} & groups.keys()


def test_rows_add_up():
    groups = {
        "a": ("attention", PRODUCTS, 3_000_000, 8),
        "b": ("attention", PRODUCTS, 1_000_000, 8),
        "c": ("optimizer", SUMS, 0, 6_000_000),
        "never": ("optimizer", SUMS, 0, 1),
    }
    rows = step_profile.profile_rows(groups, {"a": 0.006, "b": 0.002, "c": 0.024}, 2)
    product = {"what": PRODUCTS, "instructions": 2, "ms": 4.0, "share": 0.25, "GFLOP/s": 1.0, "GB/s": None}
    total = {"what": SUMS, "instructions": 1, "ms": 12.0, "share": 0.75, "GFLOP/s": None, "GB/s": 0.5}
    whole = {"what": "", "instructions": 3, "ms": 16.0, "share": 1.0, "GFLOP/s": 0.25, "GB/s": None}
    expected = [
        {"part": "optimizer", **total},
        {"part": "attention", **product},
        {"part": "all", **total},
        {"part": "all", **product},
        {"part": "all", **whole},
    ]
    assert rows == [pytest.approx(row) for row in expected]


@pytest.mark.both_backends
def test_a_traced_step_has_the_products_of_the_model(tmp_path, monkeypatch, capsys):
    made = {}

    def noting(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *of, **more: made.setdefault(name, (of, more)) and function(*of, **more)
        )

    noting(benchmark_engine, "build_engine")
    noting(benchmark_batches, "make_batches")
    noting(profiling, "Profile")
    monkeypatch.setattr(step_profile, "num_cores", lambda: 1000)
    model = dataclasses.replace(CONFIG, max_position_embeddings=32, vocab_size=30522)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(model)))
    step_profile.main(
        step_profile.ProfileConfig(
            bert_config_file=str(tmp_path / "config.json"), batch_size=4, micro_batch_size=2,
            max_seq_length=32, max_sequences_per_pack=2, steps=2, json=str(tmp_path / "profile.json"),
        )
    )  # fmt: skip
    assert made["build_engine"][1] == {"micro_batch_size": 2}
    assert made["Profile"][0][1] == range(2)
    assert made["make_batches"][0][2:6] == (32, 2, 4, 1)
    rows = json.loads((tmp_path / "profile.json").read_text())
    parts = [row for row in rows if row["part"] != "all"]
    assert {"attention", "feed-forward", "embeddings", "optimizer"} <= {row["part"] for row in parts}
    assert rows[-1]["ms"] == pytest.approx(sum(row["ms"] for row in parts))
    blocks = [
        row for row in parts if row["what"] == PRODUCTS and row["part"] in ("attention", "feed-forward")
    ]
    counts = {"num_tokens": 4 * 32, "num_pairs": 4 * 32 * 32, "num_predictions": 0, "num_sequences": 0}
    # milliseconds at 1e9 a second; every turn of the loop over micro-batches counts
    found = 1e6 * sum(row["ms"] * row["GFLOP/s"] for row in blocks)
    assert found == pytest.approx(bert_flops(model, counts))
    printed = capsys.readouterr().out
    assert "steps without a trace" in printed
    traced, busy = re.search(r"traced steps: ([\d.]+) ms, cores at instructions: (\d+) %", printed).groups()
    assert "1000 cores" in printed and busy == "0"  # of a thousand cores, fewer than five at work
    assert 0 < rows[-1]["ms"] < 0.005 * float(traced)


def test_a_trace_without_instructions_is_one_line(tmp_path):
    with pytest.raises(InputError, match="must tell of XLA's instructions"):
        instruction_times.read_threads(tmp_path, {"dot.1"})


def test_micro_batches_must_divide_the_step():
    with pytest.raises(InputError, match="`micro_batch_size` must"):
        step_profile.ProfileConfig(batch_size=3, micro_batch_size=2)
