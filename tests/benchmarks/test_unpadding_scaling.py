"""Un-padding by devices: figures beside print, our own times by a clock, files, flags and the picture."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from clock import Clock
from tiny import CONFIG

from benchmarks import unpadded_times, unpadding_scaling, unpadding_tables
from benchmarks.gumbel import Gumbel
from benchmarks.unpadded_times import Times, measure_times, read_times, split_into_groups
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.packing.algorithms import ALGORITHMS
from bert_packed.runs import interleaved_timing

TIMES = Times(
    padded=[2.0] * 10,
    unpadded=[1.0, 1.25, 1.6, 1.0, 1.25, 1.6, 2.0, 1.0, 1.25, 0.8],
    packed=[2.1, 2.0, 2.0, 2.0, 2.2, 2.0, 2.0, 2.0, 2.0, 2.0],
    packing_factor=1.9,
)


def command(*flags):
    module = unpadding_scaling
    return run(module.main, module.ScalingConfig, module.DESCRIPTION, ["unpadding_scaling", *flags])


def test_the_papers_figures_come_out(tmp_path, capsys):
    """Print has 1.94, 50 % at 32, 30 % at 2,048, packing ahead from two devices on; its 0.108 fits none."""
    written = tmp_path / "all.json"
    assert command(f"--json={written}") == 0
    tables = json.loads(written.read_text())
    found = {row["figure"]: row for row in tables["beside print"]}
    assert found["mode of one device"]["ours"] == pytest.approx(1.94, abs=0.005)
    assert found["gain on 32 devices, %"]["ours"] == pytest.approx(50, abs=2)
    assert found["gain on 2048 devices, %"]["ours"] == pytest.approx(30, abs=3)
    for number in (32, 2048):
        row = found[f"gain on {number} devices, %"]
        assert abs(row["with the printed beta"] - row["print"]) > 25
    rows = tables["scaling, the paper's times"]
    assert [row["devices"] for row in rows] == [2**power for power in range(13)]
    speeds = [row["un-padding"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert [row["packing / un-padding"] > 1 for row in rows] == [False] + [True] * 12
    assert {row["packing"] for row in rows} == {1.913}
    assert set(tables) == {"beside print", "scaling, the paper's times"}
    assert "with the printed beta" in capsys.readouterr().out


def test_times_of_a_file_become_a_table_and_a_picture(tmp_path):
    path, written = tmp_path / "times.json", tmp_path / "out.json"
    path.write_text(json.dumps({"times": dataclasses.asdict(TIMES)}))
    picture = tmp_path / "picture.png"
    flags = [f"--times_file={path}", f"--json={written}", "--devices=1,64"]
    assert command(*flags, f"--picture={picture}") == 0
    tables = json.loads(written.read_text())
    (one,) = tables["one device here"]
    assert (one["batches"], one["least"], one["largest"]) == (10, 1.0, 2.5)
    first, last = tables["scaling, times from here"]
    assert first["un-padding, seen"] == pytest.approx(np.mean([2, 1.6, 1.25, 2, 1.6, 1.25, 1, 2, 1.6, 2.5]))
    assert first["packing"] == last["packing"] == pytest.approx(1.9)  # the median of neighbours is 1
    # one pack in ten takes a tenth longer, one a twentieth; of 64 one of the first is all but sure
    assert first["packing, seen"] == pytest.approx(1.9 * (8 + 2 / 2.1 + 2 / 2.2) / 10)
    assert last["packing, seen"] == pytest.approx(1.9 * 2 / 2.2, abs=1e-3)
    for row in (first, last):
        assert row["packing / un-padding"] == row["packing"] / row["un-padding"]
        assert row["packing / un-padding, seen"] == row["packing, seen"] / row["un-padding, seen"]
    assert last["un-padding"] < first["un-padding"] == pytest.approx(Gumbel(one["alpha"], one["beta"]).mean)
    assert 1.0 < last["un-padding, seen"] < 1.01
    assert tables["times"] == dataclasses.asdict(TIMES)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_draws_the_tables(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    from benchmarks.unpadding_picture import draw

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch() or drawn.append(self))
    one = Gumbel(1.94, 0.318)
    rows = {
        "scaling, the paper's times": unpadding_tables.printed_scaling(one, [1, 2]),
        "scaling, times from here": unpadding_tables.measured_scaling(TIMES, Gumbel(1.5, 0.2), [1, 2]),
    }
    draw(rows, Gumbel(1.6, 0.13), one, (TIMES.speed_ups, Gumbel(1.5, 0.2)), tmp_path / "p.png")
    scaling, spread = drawn[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in scaling.lines}
    assert set(lines) == {
        f"{way}, {where}" for way in ("un-padding", "packing") for where in ("paper", "here")
    }
    assert lines["un-padding, here"] == [row["un-padding"] for row in rows["scaling, times from here"]]
    assert len(spread.lines) == 3 and len(spread.patches) > 1


def test_groups_hold_each_sequence_once_in_the_shortest_rows():
    lengths = np.array([3, 9, 5, 2, 4, 10])
    groups = split_into_groups(lengths, 2, np.array([4, 6, 10]))
    assert [(group.tolist(), shape) for group, shape in groups] == [([10, 9], 10), ([5, 4], 6), ([3, 2], 4)]


def test_a_batch_takes_the_time_of_its_groups(monkeypatch):
    """By a clock that is told what a call costs: its positions."""
    clock, seen = Clock(), []

    def step(batch):
        seen.append(batch)
        clock.now += batch["token_ids"].size
        return {"num_sequences": 1.0}

    monkeypatch.setattr(interleaved_timing, "time", clock)
    monkeypatch.setattr(unpadded_times, "_cheap_step", lambda config: step)
    histogram = np.zeros(24, np.int64)
    histogram[[5, 11, 23]] = 50, 25, 25
    plan = ALGORITHMS["spfhp"](histogram, 24, 3)
    times, padding = measure_times(CONFIG, histogram, plan, 4, 2, 3, 12)
    assert times.padded == times.packed == [4 * 24] * 12
    assert times.packing_factor == plan.packing_factor
    assert set(times.unpadded) <= {2 * (one + other) for one in (6, 12, 24) for other in (6, 12, 24)}
    assert len(set(times.unpadded)) > 2
    compiled = [batch["token_ids"].shape for batch in seen[:3]]
    assert compiled == [(2, 6), (2, 12), (2, 24)]
    timed = [batch for batch in seen[3:] if len(batch["token_ids"]) == 2]
    tokens = sum((batch["sequence_ids"] > 0).sum() for batch in timed[2:])  # the first batch compiles
    assert 1 - tokens / sum(times.unpadded) == pytest.approx(padding)


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_measurement(tmp_path):
    """Nothing replaced: engines and clock."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, max_position_embeddings=64)
    (tmp_path / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    written = tmp_path / "out.json"
    flags = ["--measure", f"--bert_config_file={tmp_path}/bert_config.json", "--max_seq_length=64"]
    flags += ["--batch_size=4", "--group_size=2", "--num_shapes=2", "--repeats=10", "--histogram=glue_cola"]
    assert command(*flags, f"--json={written}") == 0
    read = read_times(written)
    assert len(read.unpadded) == 10 and read.packing_factor > 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must be JSON with `times` of padded, unpadded, packed, packing_factor"),
        ("[", "must be JSON with `times`"),
        (
            json.dumps({"times": dataclasses.asdict(TIMES) | {"packed": [1.0]}}),
            "as many seconds .* 1 of packed",
        ),
        (json.dumps({"times": dataclasses.asdict(TIMES) | {"packing_factor": 0}}), "numbers above 0"),
        (json.dumps({"times": dataclasses.asdict(TIMES) | {"padded": [0.0] * 10}}), "numbers above 0"),
    ],
)
def test_files_without_times_are_refused(tmp_path, content, message):
    path = tmp_path / "times.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_times(path)


def test_times_without_a_spread_have_no_distribution(tmp_path, capsys):
    path = tmp_path / "times.json"
    same = dataclasses.asdict(TIMES) | {"unpadded": [1.0] * 10}
    path.write_text(json.dumps({"times": same}))
    assert command(f"--times_file={path}") == 2
    assert "must give different speed-ups. Received: 2 of all." in capsys.readouterr().err


def test_every_flag_of_a_measurement_arrives(monkeypatch, tmp_path):
    """What is measured, and of what, without measuring it."""
    asked = {}

    def measure(model_config, histogram, plan, **given):
        asked.update(given, layers=model_config.num_hidden_layers, length=len(histogram), plan=plan)
        return TIMES, 0.25

    monkeypatch.setattr(unpadded_times, "measure_times", measure)
    config = dataclasses.replace(CONFIG, num_hidden_layers=7, max_position_embeddings=64)
    (tmp_path / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    given = {"batch_size": 6, "group_size": 3, "num_shapes": 5, "repeats": 11, "random_seed": 9}
    flags = [f"--{name}={value}" for name, value in given.items()]
    flags += [f"--bert_config_file={tmp_path}/bert_config.json", "--histogram=glue_cola"]
    more = ["--measure", "--max_seq_length=40", "--max_sequences_per_pack=2", "--devices=4"]
    assert command(*flags, *more) == 0
    plan = asked.pop("plan")
    assert (plan.max_seq_length, plan.depth) == (40, 2)
    given["num_repeats"], given["seed"] = given.pop("repeats"), given.pop("random_seed")
    assert asked == {**given, "layers": 7, "length": 40}
    assert command(*flags, "--measure", "--max_seq_length=65") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"devices": "4,2"}, "`devices` must be whole numbers from 1 to 1,000,000,000, ascending"),
        ({"devices": "0"}, "`devices` must be whole numbers from 1"),
        ({"devices": "1" * 12}, "`devices` must be whole numbers from 1 to 1,000,000,000"),
        ({"batch_size": 64}, "`batch_size` must be left out unless --measure. Received: 64"),
        ({"histogram": "squad_1.1_384"}, "`histogram` must be left out unless --measure"),
        ({"measure": True, "max_sequences_per_pack": 600}, "`max_sequences_per_pack` must be"),
        ({"measure": True, "batch_size": 6, "group_size": 4}, "`group_size` must divide `batch_size`"),
        ({"measure": True, "times_file": "x"}, "`times_file` must be left out with measure"),
    ],
)
def test_mistakes_in_flags_are_told(flags, message):
    with pytest.raises(InputError, match=message):
        unpadding_scaling.ScalingConfig(**flags)
