"""Steps are compiled or read, one for each model, attention and device, and their launches counted.

The pinned counts alone find a workspace that counts as written, a loop whose body counts once, a slice that
counts as a read of the whole, a launch inside of a fusion, and on-chip memory that counts.
"""

import json
import subprocess
import types
from pathlib import Path

import pytest
from benchmark_command import run_benchmark, tables_of

from benchmarks import roofline
from benchmarks.synthetic_data import sums_of_a_row, wikipedia_corpus
from bert_packed.records.record_rules import read_pack_spec

FLAGS = {"models": "bert-tiny", "max_seq_length": 64, "batch_size": 4}
REPORT = {
    "device_kind": "TPU v5 lite",
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
        (folder / "step.hlo.txt").write_text(PROGRAM)
        (folder / "step.json").write_text(json.dumps({**REPORT, "estimated_seconds": seconds}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(roofline, "subprocess", types.SimpleNamespace(run=compile_step))
    rows = tables_of("roofline", tmp_path, devices="v5e:1,h100:1", **{**FLAGS, "models": model})["steps"]
    steps = [("v5e:1", "auto"), ("h100:1", "auto"), ("v5e:1", "dense"), ("h100:1", "dense")]
    assert [(row["device"], row["attention"]) for row in rows] == steps
    assert called == [(*step, "jax") for step in steps]
    tokens = 4 * sums_of_a_row(wikipedia_corpus(64), is_packed=True)["num_tokens"]
    assert rows[0]["real tokens/s, estimated"] == pytest.approx(tokens / 0.5)
    assert rows[1]["ms estimated"] is None and rows[1]["real tokens/s, estimated"] is None
    assert (rows[0]["memory, GiB"], rows[0]["of, GiB"]) == (1, 16)


PROGRAM = """HloModule jit_step
%fused (p: f32[4,8], q: s32[]) -> f32[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %slice = f32[1,8]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%slice)
}
%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %row = f32[8]{0} fusion(%x, %i), kind=kLoop, calls=%fused, \
metadata={op_name="jit(s)/jvp(bert)/layer_3/norm/mul"}
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%i, %x)
}
%cond (t: (s32[], f32[4,8])) -> pred[] {
  %t = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %on = pred[] constant(true)
}
ENTRY %main (a: f32[4,8], b: f32[8,2], c: f32[2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %c = f32[2]{0:T(128)S(1)} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %call = (f32[4,2]{1,0}, s8[33554432]{0}) custom-call(%a, %b, %c), custom_call_target="__cublas$lt$matmul",\
 metadata={op_name="jit(s)/transpose(jvp(bert))/layer_0/out/dot"}, \
backend_config={"lhs_contracting_dimensions":["1"]}
  ROOT %out = f32[4,2]{1,0} get-tuple-element(%call), index=0
}
"""


def test_counts_of_a_program(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/step.hlo.txt").write_text(PROGRAM)
    (tmp_path / "a/step.json").write_text(json.dumps(REPORT))
    tables = tables_of("roofline", tmp_path, programs=tmp_path / "a", peaks_of="h100", launch_us=1000)
    names, counts = ("pass", "part", "kind", "launches"), ("GB", "TFLOP", "ms, bound")
    found = [tuple(row[name] for name in names) for row in tables["parts"]]
    assert found == [("forward", "bert/norm", "fusion", 3), ("backward", "bert/out", "product", 1)]
    expected = [[3 * 68e-9, 0, 3], [224e-9, 128e-12, 1]]
    for row, counted in zip(tables["parts"], expected, strict=True):
        assert [row[name] for name in counts] == pytest.approx(counted)
    (step,) = tables["steps"]
    assert (step["launches"], step["below 1 MB"], step["GB in fusions"]) == (4, 4, pytest.approx(204e-9))


def test_a_launch_takes_the_longer_of_bytes_and_products():
    config = roofline.RooflineConfig(bandwidth_share=0.5, product_share=0.5, launch_us=10.0)
    bandwidth, peak = roofline.BANDWIDTHS["a100"], roofline.PEAKS["a100"]
    launches = [  # one of 4 ms of bytes, two of 6 ms of products together
        roofline.Launch(("", ""), "fusion", 1, 0.002 * bandwidth, 0.0005 * peak, 0),
        roofline.Launch(("", ""), "product", 2, 0.001 * bandwidth, 0.003 * peak, 0),
    ]
    row = roofline.times_of(config, "a100", launches)
    assert [row["ms by bytes"], row["ms by products"], row["ms, bound"]] == pytest.approx([6, 7, 10.03])


def test_a_step_that_does_not_fit_is_one_line(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 2, "", "a warning\nerror: needs 17.0 GiB")
    monkeypatch.setattr(roofline, "subprocess", types.SimpleNamespace(run=lambda *_, **__: failed))
    assert run_benchmark("roofline", **FLAGS) == 2
    assert capsys.readouterr().err.strip().endswith("bert-tiny for v5e:1: error: needs 17.0 GiB")


def test_a_step_is_compiled(tmp_path):
    pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")
    rows = tables_of("roofline", tmp_path, devices="v5e:1", attentions="dense", **FLAGS)["steps"]
    assert len(rows) == 1 and 0 < rows[0]["memory, GiB"] < rows[0]["of, GiB"]
    assert rows[0]["real tokens/s, estimated"] > 1000
