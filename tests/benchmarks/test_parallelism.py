"""Layouts over devices: formulas and tables by the paper's print, the search, the verdict."""

import dataclasses
from fractions import Fraction

import pytest
from benchmark_command import is_png, run_benchmark, tables_of

pytest.importorskip("jax", reason="pip install -e '.[jax]'")


from benchmarks import communication_volume, layout_memory, parallelism, scaling_model
from benchmarks.communication_volume import Sent, count_sent, factor, formula
from benchmarks.encoder_program import EncoderShape
from benchmarks.layout_memory import batch_rows, largest_batch, memory_rows, table2_shape
from benchmarks.parallelism import keeps_promises
from benchmarks.scaling_model import TABLE_2, TABLE_3
from bert_packed.training.step_report import StepProgram

GIBIBYTE = 2**30
WEAK_64 = EncoderShape(384, 512, 8192, 128, 1)  # a layer of the last row of Table 2
WEAK_64_MEGATRON = EncoderShape(30, 512, 8192, 128, 1)


@pytest.mark.parametrize(
    ("name", "megatron", "optimus"),
    [
        # 4 * 63/64 * 30 * 512 * 8192, and log(64) / (2 sqrt(64)) = 3/8 of 7 * 384 * 512 * 8192 + 12 * 8192^2
        ("forward", 495_452_160, 4_529_848_320),
        # 8 and 4 * 63/64; 3/8 of 21 and 36, or 14 and 24, times the same
        ("backward, whole block again", 990_904_320, 13_589_544_960),
        ("backward, all kept", 495_452_160, 9_059_696_640),
        # without a last product of 4 bsh + 4 h^2, which is 2,516,582,400
        ("backward, --remat", 743_178_240, 11_072_962_560),
    ],
)
def test_table_1_at_the_last_row_of_table_2(name, megatron, optimus):
    assert formula(name, "megatron1d", "", 8, WEAK_64_MEGATRON) == megatron
    assert formula(name, "optimus2d", "tree", 8, WEAK_64) == optimus
    # 7 blocks of each of 8 devices, where the tree sends 8 * 3
    assert formula(name, "optimus2d", "gather", 8, WEAK_64) == Fraction(optimus * 7, 24)
    twice = dataclasses.replace(WEAK_64, num_layers=2)
    assert formula(name, "optimus2d", "tree", 8, twice) == 2 * optimus


def test_a_tree_that_is_not_full_has_all_levels():
    assert [factor("optimus2d", "tree", side) * side for side in (2, 3, 4, 6, 8)] == [1, 2, 2, 3, 3]


PROGRAM = """
HloModule step, num_partitions=4

%body (t: (s32[], f32[10])) -> (s32[], f32[10]) {
  %t = (s32[], f32[10]{0}) parameter(0)
  %v = f32[10]{0} get-tuple-element(%t), index=1
  %passed = f32[10]{0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[], f32[10]{0}) tuple(%n, %passed)
}

ENTRY %main (a: f32[4,8], b: f32[16]) -> f32[16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %sum = f32[16]{0} all-reduce(%b), replica_groups={{0,1,2,3}}, to_apply=%add
  %got = f32[8,8]{1,0} all-gather(%a), replica_groups={{0,1},{2,3}}, dimensions={0}
  %w = (s32[], f32[10]{0}) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %scattered = f32[4]{0} reduce-scatter(%b), replica_groups={}, dimensions={0}, to_apply=%add
}
"""


def test_what_is_sent_by_hand():
    """A loop of six rounds; rings of four and of two."""
    sent = count_sent(PROGRAM, ("collective-permute",))
    assert sent.products == 6 * 10
    assert sent.others == 2 * 3 / 4 * 16 + 1 * 32 + 3 / 4 * 16
    unknown = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"6"}}', "")
    with pytest.raises(ValueError, match="loop of unknown length"):
        count_sent(unknown, ())


@pytest.mark.parametrize(("change", "equal"), [(0, "yes"), (-1, "NO"), (1, "NO")])
def test_a_count_that_is_not_its_formula_is_seen(monkeypatch, change, equal):
    def count_passes(layout, transport, side, shape):
        return {"forward": Sent(formula("forward", layout, transport, side, shape) + change, Fraction(1))}

    monkeypatch.setattr(communication_volume, "count_passes", count_passes)
    rows = communication_volume.communication_rows([2])
    assert [row["layout"] for row in rows] == ["megatron1d", "optimus2d", "optimus2d"]
    assert {row["equal"] for row in rows} == {equal}
    assert rows[0]["scalars by formula"] == rows[0]["scalars counted"] - change == 4 * 3 / 4 * 6 * 20 * 32


def test_the_fit_gives_the_times_of_its_row():
    machine = scaling_model.fit_machine()
    shape = dataclasses.replace(WEAK_64_MEGATRON, num_layers=24)
    times = scaling_model.seconds_a_sequence("megatron1d", shape, 64, machine)
    assert times == pytest.approx([0.4638, 1.0963])
    assert machine.rate == pytest.approx(9.2608e11, rel=1e-4)
    assert machine.seconds_per_scalar == pytest.approx(7.4452e-10, rel=1e-4)


@pytest.mark.parametrize(("table", "off"), [(TABLE_2, []), (TABLE_3, [(16, 1.08), (64, 1.18)])])
def test_printed_rows_are_consistent(table, off):
    """Throughput is one over the two times, but for the rows that the module names."""
    products = [
        (row.devices, row.throughput * (row.forward + row.backward)) for pair in table for row in pair
    ]
    assert [(number, round(one, 2)) for number, one in products if abs(one - 1) > 1e-3] == off


def test_printed_and_reckoned_ratios():
    rows = scaling_model.scaling_rows(TABLE_2, scaling_model.fit_machine())
    last = rows[-1]
    assert last["devices"] == 64
    assert round(last["training, printed"], 2) == 1.48 and round(last["inference, printed"], 2) == 1.79
    # a scalar of 7.4452e-10 s, and 24 layers of 1/64 of 12 sh^2 + 2 s^2 h at 9.2608e11 a second: 0.1687 s
    tree = 0.1687 + 24 * 4_529_848_320 / 384 * 7.4452e-10
    assert last["inference, tree"] == pytest.approx(0.4638 / tree, rel=1e-3)
    gather = 3 * 0.1687 + 0.1687 + 24 * 4 * 4_529_848_320 * 7 / 24 / 384 * 7.4452e-10
    assert last["training, gather"] == pytest.approx((0.4638 + 1.0963) / gather, rel=1e-3)


def test_at_the_width_found_devices_compute_as_much_as_wanted():
    machine = scaling_model.Machine(1e12, 1e-9)
    (row,) = scaling_model.isoefficiency_rows([64], machine, 0.5)
    h, s = row["hidden, megatron1d"], 512
    work = 4 * (12 * s * h**2 + 2 * s**2 * h) / 64 / 1e12  # of a sequence and a layer
    assert 12 * 63 / 64 * s * h * 1e-9 == pytest.approx(work, rel=1e-3)
    h = row["hidden, tree"]
    work = 4 * (12 * s * h**2 + 2 * s**2 * h) / 64 / 1e12
    sent = 3 / 8 * (28 * s * h + 48 * h**2 / (h * 3 / 64))
    assert sent * 1e-9 == pytest.approx(work, rel=1e-3)


def test_the_crossover():
    rows = {row["devices"]: row for row in scaling_model.crossover_rows([4, 16, 64])}
    # 28 bsh + 48 h^2 of which h / bs = 2048 / (96 * 512) makes 30 bsh, against 12 bsh
    assert rows[4]["tree / 1D"] == pytest.approx((1 / 2 * 30) / (12 * 3 / 4))
    assert rows[64]["tree / 1D"] == pytest.approx((3 / 8 * 30) / (12 * 63 / 64))
    assert rows[16]["tree / 1D"] > 1 > rows[64]["tree / 1D"]
    assert rows[4]["gather / 1D"] == pytest.approx((1 / 4 * 30) / (12 * 3 / 4))


@pytest.mark.parametrize("first", [8, 800])
@pytest.mark.parametrize(
    "memory",
    [
        lambda batch: 1000 + 17 * batch,
        lambda batch: 2000 + 900 * (batch // 64),
        lambda batch: 9000 + batch // 1000,
        lambda batch: 2000 + 10 * batch,  # 800 fill the budget
        lambda batch: 90_000 + batch,
    ],
)
def test_the_largest_batch_is_that_of_a_plain_search(memory, first):
    tries, budget, plain = [], 10_000, 0
    while memory(plain + 8) <= budget:
        plain += 8
    assert largest_batch(lambda batch: tries.append(batch) or memory(batch), budget, 8, first) == plain
    assert len(tries) < 40 and all(batch % 8 == 0 and batch > 0 for batch in tries)


def pretended(shape, layout, side=1, remat=False):
    """A program of known memory: weights spread, activations spread by optimus2d alone."""
    assert remat
    parts = side**2 if layout != "none" else 1
    spread = parts if layout == "optimus2d" else 1
    weights = 48 * shape.num_layers * shape.width**2 // parts
    temporary = (shape.num_layers + 8) * 4 * shape.bsh // spread
    return StepProgram("", 0.0, None, None, None, weights, weights, 0, temporary)


def test_memory_rows_are_those_of_the_programs():
    rows = memory_rows([2], 3, pretended)
    found = [(row["devices"], row["layout"]) for row in rows]
    assert found == [(1, "none"), (4, "megatron1d"), (4, "optimus2d")]
    assert {(row["batch"], row["hidden"]) for row in rows} == {(96, 2048)}
    weights = 3 * 12 * 2048**2 * 4 / 2**20
    for row in rows:
        assert row["arguments, MiB"] == row["results, MiB"] == row["kernels / p, MiB"]
        assert row["kernels / p, MiB"] == weights / row["devices"]
    temporaries = 11 * 4 * 96 * 512 * 2048 / 2**20
    assert [row["temporaries, MiB"] for row in rows] == [temporaries, temporaries, temporaries / 4]
    assert rows[2]["peak, MiB"] == 2 * weights / 4 + temporaries / 4


def test_batch_rows_are_the_largest_that_fit():
    budget = 16 * GIBIBYTE
    rows = {row["layout"]: row for row in batch_rows([8], 24, budget, pretended)}
    assert table2_shape(8, 24) == EncoderShape(384, 512, 8192, 128, 24)  # the last row of Table 2
    weights = 2 * 48 * 24 * 8192**2 // 64
    a_pack = 4 * 512 * 8192
    assert rows["megatron1d"]["largest batch"] == (budget - weights) // (32 * a_pack)
    # of 24 blocks' inputs 1/64
    assert rows["megatron1d, inputs spread"]["largest batch"] == (budget - weights) // (
        (8 + 24 / 64) * a_pack
    )
    optimus = (budget - weights) // (32 * a_pack // 64) // 8 * 8
    assert rows["optimus2d"]["largest batch"] == optimus
    assert rows["megatron1d"]["optimus2d is x"] == optimus / rows["megatron1d"]["largest batch"]
    assert [row["printed"] for row in rows.values()] == [60, 60, 480]
    for row in rows.values():
        assert row["there, GiB"] <= 16 < row["next, GiB"]


def test_a_promise_that_is_not_kept_is_seen():
    counts = [{"equal": "yes"}, {"equal": "yes"}]
    weights = [
        {"layout": "megatron1d", "weights": "kernels and tables", "1/p": "no"},
        {"layout": "optimus2d", "weights": "kernels and tables", "1/p": "yes"},
        {"layout": "optimus2d", "weights": "biases and norms", "1/p": "no"},
    ]
    memory = [
        {"devices": number, "layout": layout, "peak, MiB": peak}
        for number, layout, peak in ((1, "none", 9.0), (4, "megatron1d", 5.0), (4, "optimus2d", 4.0))
    ]
    assert keeps_promises({"communication": counts, "weights": weights, "memory": memory})
    assert not keeps_promises({"communication": [*counts, {"equal": "NO"}]})
    assert not keeps_promises({"weights": [*weights, {**weights[1], "1/p": "no"}]})
    assert not keeps_promises({"memory": [*memory[:2], {**memory[2], "peak, MiB": 5.0}]})


@pytest.fixture
def jax_command(monkeypatch):
    """The command as JAX's, without more devices: what is tested compiles nothing."""
    made = []
    monkeypatch.setattr(parallelism, "choose_backend", lambda: "jax")
    monkeypatch.setattr("bert_packed.training.backend.make_virtual_devices", made.append)
    return made


def test_the_command(jax_command, tmp_path, monkeypatch):
    for name in ("memory_rows", "batch_rows"):
        rows = getattr(layout_memory, name)
        monkeypatch.setattr(layout_memory, name, lambda *given, rows=rows: rows(*given, pretended))
    flags = {"parts": "scaling,memory,batch", "devices": "16,4", "num_layers": 24, "memory_gib": 8}
    tables = tables_of("parallelism", tmp_path, picture=tmp_path / "a.png", **flags)
    assert jax_command == [16] and is_png(tmp_path / "a.png")
    scaling = ["weak scaling, 2D over 1D", "strong scaling, 2D over 1D", "crossover", "isoefficiency at 0.5"]
    assert list(tables) == ["memory", "batch", "constants", *scaling]
    assert [row["devices"] for row in tables["memory"]] == [1, 4, 4, 1, 16, 16]
    assert tables["memory"][0]["kernels / p, MiB"] == 24 * 12 * 2048**2 * 4 / 2**20
    assert all(row["there, GiB"] <= 8 < row["next, GiB"] for row in tables["batch"])
    # 2D above 1D
    level = [{**row, "peak, MiB": 1} for row in tables["memory"]]
    monkeypatch.setattr(layout_memory, "memory_rows", lambda *_: level)
    assert run_benchmark("parallelism", parts="memory") == 1


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"devices": "4,8"}, "must be squares of 2, 4, 8, ..., separated by commas"),
        ({"parts": "memory,speed"}, "must be different ones of communication, weights, memory, batch"),
    ],
)
def test_mistakes_are_one_line(jax_command, capsys, flag, message):
    assert run_benchmark("parallelism", **flag) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_another_backend_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(parallelism, "choose_backend", lambda: "tensorflow")
    assert run_benchmark("parallelism") == 2
    assert "KERAS_BACKEND must be jax" in capsys.readouterr().err
