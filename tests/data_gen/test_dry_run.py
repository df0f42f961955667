"""The dry run: rows for every choice, lengths folded, a recommendation that truncates nothing, pictures."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from unpacked_records import make_features, write_features

from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.packing import nnlshp
from bert_packed.packing.descending import pack_lpfhp
from bert_packed.packing.histogram import fold, load_known_histogram
from data_gen import dry_run, pack_tfrecords
from data_gen.dry_run import DEPTHS, draw_efficiency, draw_histogram, recommend, try_choices
from data_gen.pack_config import PackConfig


def run(*arguments):
    argv = ["pack_tfrecords.py", "--dry_run", *arguments]
    return command_line.run(pack_tfrecords.main, PackConfig, argv)


def test_every_length_and_depth_has_a_row():
    histogram = np.array([0, 3, 5, 2, 4, 1, 0, 2, 9])  # one length above S = 8
    rows, notes = try_choices(histogram, "cghp", 8, "max")
    assert notes == ["max_seq_length=8 cuts 9 tokens of 9 sequences; the longest has 9"]
    choices = [(row["max_seq_length"], row["max_sequences_per_pack"]) for row in rows]
    assert choices == [(length, depth) for length in (3, 4, 8, 16) for depth in DEPTHS]
    for row in rows:
        length = row["max_seq_length"]
        tokens = np.dot(fold(histogram, length), np.arange(1, length + 1))
        assert row["lower_bound"] <= row["packs"]
        assert row["efficiency"] == pytest.approx(tokens / (row["packs"] * length))
        assert row["packing_factor"] == pytest.approx(26 / row["packs"])
        assert row["truncated"] == histogram[length:].sum()
        pairs = np.dot(fold(histogram, length), np.arange(1, length + 1) ** 2)
        assert row["attention_cost"] == pytest.approx(row["packs"] * length**2 / pairs) and pairs > 0
    (best,) = (row for row in rows if row["recommended"])
    assert (best["truncated"], best["tokens_cut"], best["max_seq_length"]) == (0, 0, 16)
    cut = {row["max_seq_length"]: row["tokens_cut"] for row in rows}
    for length, tokens in cut.items():
        assert tokens == sum(max(0, n - length) * count for n, count in enumerate(histogram, start=1))
    assert [row["max_seq_length"] for row in rows if row["speed_up"] is None] == [3] * 9 + [4] * 9
    for row in rows[18:]:
        cost = row["packs"] * row["max_seq_length"] * (6 * 768 + row["max_seq_length"])
        assert row["speed_up"] == pytest.approx(26 * 8 * (6 * 768 + 8) / cost)


def choice(length, packs, tokens_cut=0):
    return {"max_seq_length": length, "packs": packs, "tokens_cut": tokens_cut}


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        # the cheaper length, not the one of fewer packs or less padding
        ([choice(8, 100), choice(16, 60)], 0),
        ([choice(8, 100), choice(16, 45)], 1),
        ([choice(512, 100), choice(1024, 50)], 0),  # as many tokens, of which attention takes more
        # the smallest depth within half a percent of the best
        ([choice(8, 1006), choice(8, 1004), choice(8, 1000)], 1),
        ([choice(8, 1000), choice(8, 1000)], 0),
        ([choice(8, 1004), choice(16, 400), choice(16, 399)], 1),
        # never one that cuts text
        ([choice(8, 100, 1), choice(16, 900), choice(32, 900)], 1),
        ([choice(8, 100, 1), choice(16, 90, 2)], None),
    ],
)
def test_the_recommendation_is_the_cheapest_without_loss(rows, place):
    found = recommend(rows)
    assert found is (None if place is None else rows[place])


def test_a_choice_needs_no_last_pack(monkeypatch):
    given = {}

    def record(*arguments, **settings):
        given.update(settings)
        return pack_lpfhp(*arguments)

    monkeypatch.setitem(dry_run.ALGORITHMS, "cghp", record)
    try_choices(np.array([0, 3, 5]), "cghp", 3, 1)
    assert given == {"gap": 1e-4, "integer_programs": False}


def test_a_plan_serves_deeper_packs_only_where_it_is_as_good():
    """Depths 1 to 3 bind; from 4 on the packs are full, and one plan serves all."""
    histogram = np.array([0, 0, 0, 400, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    rows, _ = try_choices(histogram, "cghp", 16, "max")
    at_16 = [(row["max_sequences_per_pack"], row["packs"]) for row in rows if row["max_seq_length"] == 16]
    assert at_16 == [(1, 400), (2, 200), (3, 134), *((depth, 100) for depth in (4, 5, 6, 7, 8, "max"))]
    # one pack of a thousand is more than a hundredth of a percent
    histogram[[3, 4, 15]] = 0, 10, 995
    packs = [try_choices(histogram, "cghp", 16, depth)[0][2]["packs"] for depth in (2, 3)]
    rows, _ = try_choices(histogram, "cghp", 16, "max")
    assert packs == [1000, 999]
    assert [row["packs"] for row in rows if row["max_seq_length"] == 16][1:3] == packs
    # of a million they are not; and what depth 2 proves does not hold for 3
    histogram = np.zeros(17, np.int64)
    histogram[[3, 4, 8, 16]] = 253, 292, 388, 1_358_209
    alone = next(row for row in try_choices(histogram, "cghp", 17, 3)[0] if row["max_seq_length"] == 17)
    rows = [row for row in try_choices(histogram, "cghp", 17, "max")[0] if row["max_seq_length"] == 17]
    assert rows[1]["packs"] == rows[2]["packs"] > alone["packs"] >= rows[2]["lower_bound"]


def test_lengths_of_records(tmp_path, capsys):
    """Those of the input file, not of the sample corpus."""
    lengths = np.random.default_rng(5).integers(5, 25, 40)
    path = write_features(tmp_path / "records", make_features(lengths, 32))
    report = tmp_path / "report.json"
    flags = ["--max_seq_length=16", "--max_sequences_per_pack=1", f"--json={report}"]
    assert run(f"--input_file={path}", f"--output_dir={tmp_path / 'pictures'}", *flags) == 0
    rows = {row["max_seq_length"]: row for row in json.loads(report.read_text())}
    assert {size: row["packs"] for size, row in rows.items()} == dict.fromkeys((4, 8, 16, 32), 40)
    assert {size: row["tokens_cut"] for size, row in rows.items()} == {
        size: sum(max(0, length - size) for length in lengths) for size in rows
    }
    printed = capsys.readouterr()
    assert "recommended: --max_seq_length=32 " in printed.out and "max_seq_length=16 cuts" in printed.err


def test_wikipedia_is_packed_at_depth_three():
    rows, _ = try_choices(load_known_histogram("wikipedia_512"), "cghp", 512, 3)
    (best,) = (row for row in rows if row["recommended"])
    assert (best["max_seq_length"], best["max_sequences_per_pack"]) == (512, 3)
    assert 8_143_829 <= best["packs"] <= 8_143_829 * (1 + 1e-4) and best["gap"] <= 1e-4


def test_what_an_algorithm_cannot_do_is_left_out_and_told(monkeypatch):
    monkeypatch.setattr(nnlshp, "MAX_STRATEGIES", 29)
    rows, notes = try_choices(np.array([0, 3, 5, 2, 4, 1, 0, 2]), "nnlshp", 8, "max")
    tried = [(row["max_seq_length"], row["max_sequences_per_pack"]) for row in rows]
    assert tried == [(length, depth) for length in (3, 4, 8, 16) for depth in DEPTHS][: 27 + 2]
    (note,) = notes
    assert "nnlshp cannot do it: length 16 at depth 3, 4, 5, 6, 7, 8, max. First error: least squares" in note


def test_pictures_say_what_they_show(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *of, **how: drawn.append(of[0]) or save(*of, **how))
    histogram = np.zeros(50_000, np.int64)
    histogram[[3, 50, 49_999]] = 2**53  # their sum passes 64 bits in no place
    draw_histogram(histogram, 512, tmp_path / "lengths.png")
    (axes,) = drawn[0].axes
    assert len(axes.patches) == 1  # a bar for each length took minutes
    assert axes.get_yscale() == "linear"
    for most, scale in ((50, "linear"), (51, "log")):  # one bar of truncated sequences would flatten all
        draw_histogram(np.array([1, 0, 1, most]), 4, tmp_path / "lengths.png")
        assert drawn.pop().axes[0].get_yscale() == scale
    share = 1 - (4 + 51 + 512) / (3 * 512)
    assert (
        axes.get_title() == f"{3 * 2**53:,} sequences; {share:.1%} of the tokens are padding without packing"
    )
    rows, _ = try_choices(np.array([0, 3, 5, 0, 1]), "lpfhp", 4, 2)
    draw_efficiency(rows, tmp_path / "efficiency.png")
    (axes,) = drawn[1].axes
    (best,) = (row for row in rows if row["recommended"])
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert lines == {
        **{
            f"{size} tokens, cuts text": [100 * rows[place]["efficiency"]]
            for place, size in enumerate((3, 4))
        },
        "8 tokens": [100 * rows[2]["efficiency"]],
        "recommended": [100 * best["efficiency"]],
    }
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_counts_whose_sum_passes_64_bits():
    rows, _ = try_choices(np.full(12, 2**51), "lpfhp", 16, 1)
    assert [row["packs"] for row in rows if row["max_seq_length"] == 16] == [12 * 2**51]
    with pytest.raises(InputError, match=r"must not count more than 2\*\*53 sequences of a length"):
        try_choices(np.full(12, 2**53), "lpfhp", 8, 1)


def test_command(tmp_path, capsys):
    histogram, report, pictures = tmp_path / "lengths.json", tmp_path / "report.json", tmp_path / "pictures"
    flags = [f"--histogram={histogram}", "--max_sequences_per_pack=2", f"--output_dir={pictures}"]
    histogram.write_text(json.dumps({"lengths": [3, 5, 9], "counts": [4, 4, 2]}))
    assert run(*flags, "--max_seq_length=8", f"--json={report}") == 0
    rows = json.loads(report.read_text())
    at_eight = next(row for row in rows if row["max_seq_length"] == 8)
    # 3 + 5 four times, and two of 9 truncated to 8
    assert (at_eight["packs"], at_eight["lower_bound"], at_eight["truncated"]) == (6, 6, 2)
    assert (at_eight["gap"], at_eight["strategies"], at_eight["seconds"] > 0) == (0, 2, True)
    assert sorted(path.name for path in pictures.iterdir()) == [
        "efficiency_by_depth.png",
        "length_histogram.png",
    ]
    (best,) = (row for row in rows if row["recommended"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"recommended: --max_seq_length={best['max_seq_length']} --max_sequences_per_pack=2, "
        f"{best['speed_up']:.2f} times as fast as unpacked data of length 8; pictures in {pictures}"
    )
    # lengths from 3 to 12 all cut the long one
    histogram.write_text(json.dumps({"lengths": [3, 5, 20], "counts": [4, 4, 2]}))
    assert run(*flags, "--max_seq_length=6") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"none is recommended: every length tried cuts text; pictures in {pictures}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs either `input_file` or `histogram`"),
        (["--histogram=x.json", "--input_file=y"], "needs either `input_file` or `histogram`"),
        (["--histogram=/none.json"], "No such file"),
        (["--histogram=bad.json"], "bad.json: must be JSON with `lengths` and `counts`"),
        (["--histogram=empty.json"], "must count a sequence"),
        (
            ["--histogram=wikipedia_512", "--algorithm=nnlshp", "--max_sequences_per_pack=20"],
            "`algorithm` nnlshp cannot pack these lengths",
        ),
        (
            ["--histogram=wikipedia_512", "--overlong=drop"],
            "`overlong` must be left out with --dry_run, which cannot follow it. Received: 'drop'",
        ),
        (
            ["--input_file=x", "--features=a:int:9"],
            "`features` must be left out with --dry_run, which cannot follow it. Received: 'a:int:9'",
        ),
        (
            ["--histogram=wikipedia_512", "--max_predictions_per_pack=9"],
            "`max_predictions_per_pack` must be left out with --dry_run, which cannot follow it. Received: 9",
        ),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[1, 2]")
    (tmp_path / "empty.json").write_text('{"lengths": [3], "counts": [0]}')
    assert run(*arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert not (tmp_path / "packing_report").exists()
