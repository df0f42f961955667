"""Un-padding by devices: figures beside print, our own times, files, flags and the picture."""

import numpy as np
import pytest
from benchmark_command import config_class, is_png, run_benchmark, tables_of, write_config

from benchmarks import unpadding
from benchmarks.gumbel import Gumbel
from benchmarks.unpadding import measured_scaling, split_into_groups
from bert_packed.core.settings import InputError


def test_the_papers_figures_come_out(tmp_path):
    """Print has 1.94, 50 % at 32, 30 % at 2,048, packing ahead from two devices on; its 0.108 fits none."""
    tables = tables_of("unpadding", tmp_path, picture=tmp_path / "a.png")
    found = {row["figure"]: row for row in tables["beside print"]}
    assert found["mode of one device"]["ours"] == pytest.approx(1.94, abs=0.005)
    assert found["gain on 32 devices, %"]["ours"] == pytest.approx(50, abs=2)
    assert found["gain on 2048 devices, %"]["ours"] == pytest.approx(30, abs=3)
    for row in (found["gain on 32 devices, %"], found["gain on 2048 devices, %"]):
        assert abs(row["with the printed beta"] - row["print"]) > 25
    rows = tables["scaling, the paper's times"]
    assert [row["devices"] for row in rows] == [2**power for power in range(13)]
    speeds = [row["un-padding"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert [row["packing / un-padding"] > 1 for row in rows] == [False] + [True] * 12
    assert {row["packing"] for row in rows} == {1.913}
    assert set(tables) == {"beside print", "scaling, the paper's times"} and is_png(tmp_path / "a.png")


def test_own_times_become_speed_ups():
    own = Gumbel(1.5, 0.2)
    unpadded = [1.0, 1.25, 1.6, 1.0, 1.25, 1.6, 2.0, 1.0, 1.25, 0.8]
    seconds = {"padded": [2.0] * 10, "unpadded": unpadded, "packed": [2.1, 2.2, *[2.0] * 8]}
    speed_ups = [2.0 / one for one in unpadded]
    of_packs = [1.9 * 2.0 / one for one in seconds["packed"]]
    one = unpadding.describe(seconds, 1.9, speed_ups, own)
    assert (one["batches"], one["least"], one["largest"], one["packed, s"]) == (10, 1.0, 2.5, 2.0)
    first, last = measured_scaling(speed_ups, of_packs, own, [1, 64])
    assert first["un-padding, seen"] == pytest.approx(np.mean(speed_ups))
    assert first["packing"] == last["packing"] == pytest.approx(1.9)  # the median
    # one pack in ten takes a tenth longer, one a twentieth; of 64 one of the first is all but sure
    assert first["packing, seen"] == pytest.approx(1.9 * (8 + 2 / 2.1 + 2 / 2.2) / 10)
    assert last["packing, seen"] == pytest.approx(1.9 * 2 / 2.2, abs=1e-3)
    for row in (first, last):
        assert row["packing / un-padding"] == row["packing"] / row["un-padding"]
        assert row["packing / un-padding, seen"] == row["packing, seen"] / row["un-padding, seen"]
    assert last["un-padding"] < first["un-padding"] == pytest.approx(own.mean)
    assert 1.0 < last["un-padding, seen"] < 1.01


def test_a_measurement_is_of_neighbours(monkeypatch, tmp_path):
    """Un-padding over padded rows; packs in sequences a second."""
    seconds = {"padded": [2.0] * 10, "unpadded": [1.0] * 9 + [1.6], "packed": [2.5] * 10}
    monkeypatch.setattr(unpadding, "measure_times", lambda config: (seconds, 1.9, 0.25))
    tables = tables_of("unpadding", tmp_path, measure="true", picture=tmp_path / "a.png")
    (one,) = tables["one device here"]
    assert (one["least"], one["largest"], one["packing factor"]) == (1.25, 2.0, 1.9) and is_png(
        tmp_path / "a.png"
    )
    first, *_ = tables["scaling, times from here"]
    assert first["packing"] == pytest.approx(1.9 * 2.0 / 2.5)


def test_groups_hold_each_sequence_once_in_the_shortest_rows():
    lengths = np.array([3, 9, 5, 2, 4, 10])
    groups = split_into_groups(lengths, np.array([4, 6, 10]), 2)
    assert [(group.tolist(), shape) for group, shape in groups] == [([10, 9], 10), ([5, 4], 6), ([3, 2], 4)]


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(monkeypatch, tmp_path, uncompiled):
    monkeypatch.setattr(unpadding, "NUM_SHAPES", 3)  # each a program to compile
    config = write_config(tmp_path / "config.json", num_hidden_layers=1, max_position_embeddings=64)
    flags = {"measure": "true", "bert_config_file": config, "max_seq_length": 32, "histogram": "glue_cola"}
    flags |= {"batch_size": 4, "repeats": 10}
    tables = tables_of("unpadding", tmp_path, **flags)
    assert tables["one device here"][0]["batches"] == 10
    assert run_benchmark("unpadding", **flags | {"max_seq_length": 65}) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch_size": 64}, "`batch_size` must"),
        ({"measure": True, "batch_size": 6}, "`batch_size` must be a multiple of 4. Received: 6"),
    ],
)
def test_mistakes_in_flags(flags, message):
    with pytest.raises(InputError, match=message):
        config_class(unpadding)(**flags)
