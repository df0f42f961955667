"""The dry run: rows for every choice, lengths folded, a recommendation that truncates nothing, pictures."""

import itertools
import json

import numpy as np
import pytest
from recorded_calls import run
from unpacked_records import make_features, write_features

from bert_packed.packing.histogram import fold, load_known_histogram
from bert_packed.records import tfrecords
from data_gen import pack_tfrecords
from data_gen.dry_run import DEPTHS, read_histogram, recommend, try_choices
from data_gen.pack_config import PackConfig


def dry_run(**flags):
    """What the command printed, and on standard error."""
    seen = run(pack_tfrecords.main, PackConfig, dry_run=True, **flags)
    assert seen.status == 0, seen.error
    return seen.out, seen.error


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
        assert row["tokens_cut"] == sum(max(0, n - length) * count for n, count in enumerate(histogram, 1))
        pairs = np.dot(fold(histogram, length), np.arange(1, length + 1) ** 2)
        assert row["attention_cost"] == pytest.approx(row["packs"] * length**2 / pairs) and pairs > 0
    (best,) = (row for row in rows if row["recommended"])
    assert (best["truncated"], best["tokens_cut"], best["max_seq_length"]) == (0, 0, 16)
    assert [row["max_seq_length"] for row in rows if row["total_speed_up"] is None] == [3] * 9 + [4] * 9
    for row in rows[18:]:
        cost = row["packs"] * row["max_seq_length"] * (6 * 768 + row["max_seq_length"])
        assert row["total_speed_up"] == pytest.approx(26 * 8 * (6 * 768 + 8) / cost)


def choice(length, packs, tokens_cut=0):
    return {"max_seq_length": length, "packs": packs, "tokens_cut": tokens_cut}


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        # the cheaper length wins over fewer packs or less padding
        ([choice(8, 100), choice(16, 60)], 0),
        ([choice(8, 100), choice(16, 45)], 1),
        ([choice(512, 100), choice(1024, 50)], 0),  # as many tokens, of which attention takes more
        # the smallest depth within half a percent of the best wins
        ([choice(8, 1006), choice(8, 1004), choice(8, 1000)], 1),
        ([choice(8, 1000), choice(8, 1000)], 0),
        ([choice(8, 1004), choice(16, 400), choice(16, 399)], 1),
        # a length that cuts text never wins
        ([choice(8, 100, 1), choice(16, 900), choice(32, 900)], 1),
        ([choice(8, 100, 1), choice(16, 90, 2)], None),
    ],
)
def test_the_recommendation_is_the_cheapest_without_loss(rows, place):
    found = recommend(rows)
    assert found is (None if place is None else rows[place])


def test_command_on_records(tmp_path):
    """Lengths are those of the input file, rather than of the sample corpus."""
    lengths = np.random.default_rng(5).integers(5, 25, 40)
    path, report = write_features(tmp_path / "records", make_features(lengths, 32)), tmp_path / "report.json"
    given = {"input_file": path, "output_dir": tmp_path / "pictures", "json": report}
    printed, notes = dry_run(**given, max_seq_length=16, max_sequences_per_pack=1)
    found = [
        (row["max_seq_length"], row["packs"], row["tokens_cut"]) for row in json.loads(report.read_text())
    ]
    assert found == [(size, 40, np.maximum(lengths - size, 0).sum()) for size in (4, 8, 16, 32)]
    assert "recommended: --max_seq_length=32 " in printed and "max_seq_length=16 cuts" in notes


def test_command_on_a_histogram(tmp_path):
    histogram, report, pictures = tmp_path / "lengths.json", tmp_path / "report.json", tmp_path / "pictures"
    flags = {"histogram": histogram, "max_sequences_per_pack": 2, "output_dir": pictures}
    histogram.write_text(json.dumps({"lengths": [3, 5, 9], "counts": [4, 4, 2]}))
    printed, _ = dry_run(**flags, max_seq_length=8, json=report)
    rows = json.loads(report.read_text())
    at_eight = next(row for row in rows if row["max_seq_length"] == 8)
    # 3 + 5 four times, and two of 9 truncated to 8
    assert (at_eight["packs"], at_eight["lower_bound"], at_eight["truncated"]) == (6, 6, 2)
    assert (at_eight["gap"], at_eight["strategies"], at_eight["seconds"] > 0) == (0, 2, True)
    names = {path.name for path in pictures.iterdir()}
    assert names == {"efficiency_by_depth.png", "length_histogram.png"}
    (best,) = (row for row in rows if row["recommended"])
    assert printed.splitlines()[-1] == (
        f"recommended: --max_seq_length={best['max_seq_length']} --max_sequences_per_pack=2, "
        f"2.00 times as fast as unpacked data of that length, {best['total_speed_up']:.2f} times "
        f"that of length 8; pictures in {pictures}"
    )
    # lengths from 3 to 12 all cut the long one
    histogram.write_text(json.dumps({"lengths": [3, 5, 20], "counts": [4, 4, 2]}))
    printed, _ = dry_run(**flags, max_seq_length=6)
    assert printed.endswith(f"none is recommended: every length tried cuts text; pictures in {pictures}\n")


def test_lengths_of_all_files_and_batches_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecords, "READ_BATCH", 2)
    lengths = {"a": [3, 9, 3], "b": [12, 2, 3, 3, 1], "c": [2]}  # the longest comes late, then shorter ones
    for name, its in lengths.items():
        write_features(tmp_path / f"{name}.tfrecord", make_features(its, 16))
    found = read_histogram("", f"{tmp_path}/*.tfrecord")
    assert found.tolist() == np.bincount([*itertools.chain(*lengths.values())])[1:].tolist()


def test_a_file_precedes_a_known_histogram(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = read_histogram("glue_cola", "")
    assert known.tolist() == load_known_histogram("glue_cola").tolist()
    (tmp_path / "glue_cola").write_text(json.dumps({"lengths": [2], "counts": [5]}))
    assert read_histogram("glue_cola", "").tolist() == [0, 5]
