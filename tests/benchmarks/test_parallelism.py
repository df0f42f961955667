"""Layouts over devices: formulas by the paper's print, counts by hand, the verdict."""

import dataclasses
from fractions import Fraction

import pytest

pytest.importorskip("jax", reason="pip install -e '.[jax]'")

from benchmarks import communication_volume
from benchmarks.communication_volume import Sent, count_sent, factor, formula
from benchmarks.encoder_program import EncoderShape
from benchmarks.parallelism import keeps_promises

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
        # 4 bsh + 4 h^2, the last product, is left out: 2,516,582,400
        ("backward, --remat", 743_178_240, 11_072_962_560),
    ],
)
def test_table_1_at_the_last_row_of_table_2(name, megatron, optimus):
    assert formula(name, "megatron1d", "", 8, WEAK_64_MEGATRON) == megatron
    assert formula(name, "optimus2d", "tree", 8, WEAK_64) == optimus
    # each of 8 devices sends 7 blocks, where the tree sends 8 * 3
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


def test_sent_scalars_by_hand():
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


def test_a_promise_that_is_not_kept_is_seen():
    counts = [{"equal": "yes"}, {"equal": "yes"}]
    memory = [
        {"devices": number, "layout": layout, "peak, MiB": peak}
        for number, layout, peak in ((1, "none", 9.0), (4, "megatron1d", 5.0), (4, "optimus2d", 4.0))
    ]
    assert keeps_promises({"communication": counts, "memory": memory})
    assert not keeps_promises({"communication": [*counts, {"equal": "NO"}]})
    assert not keeps_promises({"memory": [*memory[:2], {**memory[2], "peak, MiB": 5.0}]})
