"""The committed page of results has the tables of its JSON, of the commands that it names."""

import copy
import importlib
import re

import pytest

from benchmarks import results_page
from benchmarks.measurements import MEASUREMENTS, Measurement, Table
from benchmarks.page_pictures import PICTURES
from benchmarks.pictures import COLORS
from benchmarks.results_page import DATA, MOST_ROWS, PAGE, ROOT
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_text, write_json

TABLE = Table("steps", {"way": "", "s/step": "s a step"}, {"packed": "in packs", "padded": "padded"})
ONE = Measurement("training_speed", "training_speed --repeats=3", 1, {"speed": TABLE})
CONTENT = {
    "benchmark": "training_speed",
    "machine": {
        "cpu": "One CPU",
        "cores": 2,
        "backend": "jax",
        "versions": {"jax": "1"},
        "date": "2026-11-30",
        "commit": "0123456789ab",
    },
    "settings": results_page.settings_of(ONE),
    "tables": {
        "steps": [
            {"way": "padded", "s/step": 1234.5},
            {"way": "other", "s/step": 1.0},
            {"way": "packed", "s/step": 0.123456},
            {"way": "packed", "s/step": 2.0},
        ]
    },
}
SPEED = """
|  | s a step |
|---|---|
| in packs | 0.1235 |
| padded | 1,234 |

Measured on 2 cores of One CPU; 2026-11-30, commit 0123456789ab.

    python -m benchmarks.training_speed --repeats=3

"""


def test_the_committed_page_is_as_its_data(capsys):
    data = results_page.read_data(ROOT / DATA)
    text = read_text(str(ROOT / PAGE))
    assert results_page.written(text, data) == text, "python -m benchmarks.results_page"
    command = (
        results_page.main,
        results_page.PageConfig,
        results_page.DESCRIPTION,
        ["results_page", "--check"],
    )
    assert run(*command) == 0 and "is as its data" in capsys.readouterr().out


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda one: one.name)
def test_every_table_is_of_a_benchmark_and_of_few_rows(measurement):
    settings = results_page.settings_of(measurement)  # the command can be parsed
    assert settings["json"] == ""
    source = read_text(importlib.import_module(measurement.module).__file__)
    for table in measurement.tables.values():
        assert f'"{table.name}"' in source
        assert len(table.rows or ()) <= MOST_ROWS


def test_ratios_are_beside_the_speeds_that_they_are_of():
    table = Table("steps", {"way": "", "s/step": "s", "median": "by", "from": "from"}, ratios="speed-ups")
    content = copy.deepcopy(CONTENT)
    content["tables"]["speed-ups"] = [{"figure": "speed-up over padded", "median": 2.0, "from": None}]
    titles, *rows = results_page.chosen_rows(table, content)
    assert titles == ["", "s", "by", "from"]
    assert rows[:2] == [["padded", "1,234", "2", ""], ["other", "1", "", ""]]


def test_commands_are_listed_with_their_minutes(capsys):
    assert results_page.main(results_page.PageConfig(commands=True)) == 0
    printed = capsys.readouterr().out
    for one in MEASUREMENTS:
        assert f"# {one.name}: {one.minutes} minutes" in printed
        assert f"{one.line} --json={DATA}/{one.name}.json\n" in printed


def test_a_block_is_written_between_its_marks(monkeypatch):
    monkeypatch.setattr(results_page, "MEASUREMENTS", (ONE,))
    page = "# A\n<!-- table: machines -->\nold\n<!-- end -->\n\n<!-- table: speed -->\n<!-- end -->\nlast\n"
    text = results_page.written(page, {"training_speed": CONTENT})
    assert f"<!-- table: speed -->\n{SPEED}<!-- end -->\nlast\n" in text
    file = "[training_speed](data/training_speed.json)"
    assert f"| {file} | 2 cores of One CPU | jax | 2026-11-30 | 0123456789ab |" in text
    assert "old" not in text and results_page.written(text, {"training_speed": CONTENT}) == text
    emptied = results_page.written(text, {})
    assert "0.1235" not in emptied and "--repeats=3" in emptied
    for missing in ("machines", "speed"):
        with pytest.raises(InputError, match="must have a block for each"):
            results_page.written(re.sub(f"<!-- table: {missing} -->", "", page), {})


def test_forecasts_are_no_measurements():
    assert results_page.origin({**CONTENT, "benchmark": "forecast"}).startswith("Estimated by the devices' ")


def test_an_accelerator_is_named_by_its_device():
    machine = {**CONTENT["machine"], "device": "TPU v5e"}
    assert results_page.machine_name({**CONTENT, "machine": machine}) == "TPU v5e"


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("machine", "cpu", "", "machine.cpu must be there"),
        ("machine", "date", None, "machine.date must be there"),
        ("machine", "commit", "", "machine.commit must be there"),
        ("machine", "commit", "01+", "must be of a clean checkout"),
        ("settings", "repeats", 4, "`repeats` must be 3. Received: 4"),
    ],
)
def test_a_file_without_its_origin_is_refused(tmp_path, monkeypatch, part, name, value, message):
    monkeypatch.setattr(results_page, "MEASUREMENTS", (ONE,))
    content = copy.deepcopy(CONTENT)
    content["settings"]["json"] = "elsewhere.json"  # changes no figure
    write_json(tmp_path / "training_speed.json", content)
    assert results_page.read_data(tmp_path).keys() == {"training_speed"}
    content[part][name] = value
    write_json(tmp_path / "training_speed.json", content)
    with pytest.raises(InputError, match=re.escape(message)):
        results_page.read_data(tmp_path)


def test_a_file_of_no_measurement_is_refused(tmp_path):
    write_json(tmp_path / "speed.json", CONTENT)
    with pytest.raises(InputError, match="must be named after a measurement"):
        results_page.read_data(tmp_path)


def test_long_commands_are_broken_before_their_flags():
    command = f"python -m benchmarks.x --a='{'b ' * 30}' --c={'d' * 40} --e"
    assert results_page.wrapped(command) == (
        f"    python -m benchmarks.x --a='{'b ' * 30}' \\\n        --c={'d' * 40} --e"
    )


def test_bars_are_the_numbers_of_the_committed_data():
    data = results_page.read_data(results_page.ROOT / results_page.DATA)
    page = (results_page.ROOT / results_page.PAGE).read_text()
    for picture in PICTURES:
        bars = results_page.amounts(picture, data)
        assert len(bars) == len(picture.bars) > 1 and f"../pictures/{picture.name}.png" in page
        caption = page.partition(f"../pictures/{picture.name}.png")[0].rpartition("![")[2]
        for kind, number in bars.values():
            assert kind in COLORS and f"{number:,.0f}" in caption
