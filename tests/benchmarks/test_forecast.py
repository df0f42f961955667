"""Forecasts are rows of the reports that commands write, one for each model, attention and device."""

import json
import subprocess
import types
from pathlib import Path

import pytest
from benchmark_command import run_benchmark, tables_of

from benchmarks import forecast
from benchmarks.synthetic_data import sums_of_a_row, wikipedia_corpus
from bert_packed.records.record_rules import read_pack_spec

FLAGS = {"models": "bert-tiny", "max_seq_length": 64, "batch_size": 4}
REPORT = {
    "estimated_seconds": 0.5,
    "train_batch_size": 4,
    "peak_bytes": 2**30,
    "device_memory_bytes": 16 * 2**30,
}


@pytest.mark.parametrize("model", ["bert-tiny", "mamba-tiny"])
def test_a_row_for_each_step_that_is_compiled(tmp_path, monkeypatch, model):
    called = []

    def compile_step(command, env, **_):
        flags = dict(one.removeprefix("--").split("=", 1) for one in command[2:])
        assert flags["objective"] == ("causal_lm" if model == "mamba-tiny" else "mlm_nsp")
        called.append((flags["compile_for"], flags["attention"], env["KERAS_BACKEND"]))
        assert flags["train_batch_size"] == flags["micro_batch_size"] == "4"
        spec = read_pack_spec([flags["input_file"]])
        assert (spec.max_seq_length, spec.objective) == (64, flags["objective"])
        folder = Path(flags["compile_only"])
        folder.mkdir(exist_ok=True)
        seconds = None if flags["compile_for"] == "h100:1" else 0.5
        (folder / "step.json").write_text(json.dumps({**REPORT, "estimated_seconds": seconds}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(forecast, "subprocess", types.SimpleNamespace(run=compile_step))
    rows = tables_of("forecast", tmp_path, devices="v5e:1,h100:1", **{**FLAGS, "models": model})["steps"]
    steps = [("v5e:1", "auto"), ("h100:1", "auto"), ("v5e:1", "dense"), ("h100:1", "dense")]
    assert [(row["device"], row["attention"]) for row in rows] == steps
    assert called == [(*step, "jax") for step in steps]
    tokens = 4 * sums_of_a_row(wikipedia_corpus(64), is_packed=True)["num_tokens"]
    assert rows[0]["real tokens/s, estimated"] == pytest.approx(tokens / 0.5)
    assert rows[1]["s/step, estimated"] is None and rows[1]["real tokens/s, estimated"] is None
    assert (rows[0]["memory, GiB"], rows[0]["of, GiB"]) == (1, 16)


def test_a_step_that_does_not_fit_is_one_line(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 2, "", "a warning\nerror: needs 17.0 GiB")
    monkeypatch.setattr(forecast, "subprocess", types.SimpleNamespace(run=lambda *_, **__: failed))
    assert run_benchmark("forecast", **FLAGS) == 2
    assert capsys.readouterr().err.strip().endswith("bert-tiny for v5e:1: error: needs 17.0 GiB")


def test_a_step_is_compiled(tmp_path):
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    rows = tables_of("forecast", tmp_path, devices="v5e:1", attentions="dense", **FLAGS)["steps"]
    assert len(rows) == 1 and 0 < rows[0]["memory, GiB"] < rows[0]["of, GiB"]
    assert rows[0]["real tokens/s, estimated"] > 1000
