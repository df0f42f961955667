"""`--compile_only`: what it writes, what it leaves alone, its exit status, its mistakes, virtual devices."""

import json
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
from tiny import CONFIG, make_engine, write_data

from bert_packed import cli
from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import RECORDED
from bert_packed.parallel.targets import ACCELERATORS, Target
from bert_packed.runs import compile_only
from bert_packed.runs.compile_only import STATUS_NOT_STATIC, empty_batch
from bert_packed.runs.pretraining import Run
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.runs.pretraining_data import read_data
from bert_packed.training.step_report import StepProgram

TEXT = """HloModule step, num_partitions=2

ENTRY %main (a: f32[4,6]) -> f32[4,6] {
  %a = f32[4,6]{1,0} parameter(0)
  ROOT %sum = f32[4,6]{1,0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
}
"""
CALLBACK = '  %h = () custom-call(%a), custom_call_target="xla_python_gpu_callback"\n  ROOT'


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture
def asked(monkeypatch):
    """A compiler that gives `program`; the batches that it was called with, and the numbers of devices."""
    asked = types.SimpleNamespace(batches=[], devices=[])
    asked.program = StepProgram(TEXT, 2.5, flops=24.0, bytes_accessed=96.0)
    engine = make_engine()
    engine.step_program = lambda batch: asked.batches.append(batch) or asked.program
    monkeypatch.setattr(compile_only.Run, "build_engine", lambda _: engine)
    monkeypatch.setattr(compile_only, "make_virtual_devices", asked.devices.append)
    return asked


def run(data, **flags):
    flags = {
        "input_file": f"{data}/packed-*.tfrecord",
        "bert_config_file": f"{data}/bert_config.json",
        "train_batch_size": 4,
        **flags,
    }
    argv = ["run_pretraining.py", *(f"--{name}={value}" for name, value in flags.items())]
    return command_line.run(cli.pretrain, PretrainingConfig, argv)


def test_the_report_and_the_table(data, asked, tmp_path, capsys):
    target = tmp_path / "new" / "compiled"
    assert run(data, compile_only=target, num_virtual_devices=2) == 0 and asked.devices == [2]
    assert {path.name for path in target.iterdir()} == {"step.hlo.txt", "step.json"}
    assert (target / "step.hlo.txt").read_text() == TEXT
    report = json.loads((target / "step.json").read_text())
    names = ("backend", "programs", "devices", "flops", "compile_seconds")
    assert [report[name] for name in names] == [keras.backend.backend(), 1, 2, 24.0, 2.5]
    assert report["temporary_bytes"] is None and report["collective_bytes"] == 96
    assert report["versions"]["keras"] == keras.__version__
    printed = capsys.readouterr().out
    assert "host callbacks" in printed and "not told" in printed and "all-reduce" in printed
    (batch,) = asked.batches
    assert batch.keys() == {feature.name for feature in RECORDED} and len(batch["token_ids"]) == 4


def test_the_batch_is_one_of_the_pipeline(data, tmp_path):
    from bert_packed.data.batches import CheckedBatches
    from bert_packed.data.input_pipeline import train_batches

    given = PretrainingConfig(input_file=f"{data}/packed-*.tfrecord", output_dir=str(tmp_path))
    files = read_data(given).train
    dataset = train_batches(files.index, files.spec, 4, seed=1, shuffle_buffer_size=1)
    real = next(iter(CheckedBatches(dataset, files.files, files.spec, CONFIG)))
    ours = empty_batch(RECORDED, files.spec, 4)
    shapes = [{name: (v.shape, v.dtype) for name, v in batch.items()} for batch in (ours, real)]
    assert shapes[0] == shapes[1]
    assert not any(np.any(values) for values in ours.values())


def test_a_step_that_is_not_static_is_reported_and_is_no_success(data, asked, tmp_path, capsys):
    asked.program = StepProgram(TEXT.replace("  ROOT", CALLBACK), 1.0)
    assert run(data, compile_only=tmp_path / "a") == STATUS_NOT_STATIC
    assert "not static: %h = () custom-call" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "step.json").read_text())["host_callbacks"] == 1


def test_a_run_is_left_alone(data, asked, tmp_path):
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    (output_dir / "run.json").write_text("{}")
    assert run(data, output_dir=output_dir, compile_only=tmp_path / "compiled", overwrite=True) == 0
    assert {path.name: path.read_text() for path in output_dir.iterdir()} == {"run.json": "{}"}
    assert run(data, output_dir=tmp_path / "none", compile_only=tmp_path / "compiled") == 0
    assert not (tmp_path / "none").exists()


def test_mistakes(data, asked, tmp_path, capsys):
    """The next start of a run would find files in its folder that are not its own."""
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    for name, num_devices, message in (
        ("file", 0, "`compile_only` must be a folder. Received: "),
        ("run", 0, "`compile_only` must not be the output_dir of a run"),
        ("new", 4, "must be as many as the step runs on, which is 2"),
    ):
        assert run(data, compile_only=tmp_path / name, num_virtual_devices=num_devices) == 2
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_shapes_need_no_pass_over_the_data(data, tmp_path, asked):
    """Only the first record of a file is read: one that is cut off later will do."""
    whole = (data / "packed-0.tfrecord").read_bytes()
    (tmp_path / "cut.tfrecord").write_bytes(whole[:-10])
    assert run(data, input_file=tmp_path / "cut.tfrecord", compile_only=tmp_path / "compiled") == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 13, 16, 100])
@pytest.mark.parametrize("power", [1, 2])
def test_the_largest_micro_batch_is_found(monkeypatch, capsys, limit, power):
    """A device takes `limit` packs at once, where four share a step."""
    tried = []
    has, arguments = ACCELERATORS["v5e"].memory_bytes, 1 << 30
    of_limit = has - (1 << 28) - arguments  # what `limit` packs need besides

    def compile_step(run):
        config = run.config
        tried.append(config.packs_at_once // 4)
        assert config.packs_at_once % 4 == 0 and config.train_batch_size % config.packs_at_once == 0
        assert 0 <= config.train_batch_size - 64 < config.packs_at_once
        if tried[-1] > limit:
            raise compile_only.TooLargeError(target, config.packs_at_once, "9G", "8G")
        peak = arguments + int(of_limit * (tried[-1] / limit) ** power)
        return types.SimpleNamespace(argument_bytes=arguments, peak_bytes=peak, packs=config.packs_at_once)

    monkeypatch.setattr(compile_only, "compile_step", compile_step)
    growth = {"initial_batch_size": 32, "batch_warmup_steps": 5} if limit == 5 else {}
    config = PretrainingConfig(
        input_file="x", output_dir="y", train_batch_size=64, micro_batch_size=32, **growth
    )
    target = Target("tpu", ("device",) * 4, ACCELERATORS["v5e"], "v5e:2x2")
    found, program = compile_only.find_largest(Run(config, target=target))
    assert program.packs == found.packs_at_once and found.packs_at_once // 4 <= limit
    assert limit - found.packs_at_once // 4 <= limit / 16
    assert len(tried) == len(set(tried)) <= (7 if power == 1 else 8)
    assert f"too large  {4 * min(size for size in tried if size > limit)} packs" in capsys.readouterr().out


def test_a_pack_that_does_not_fit_alone_is_an_error(monkeypatch):
    def compile_step(run):
        raise compile_only.TooLargeError(target, run.config.packs_at_once, "9G", "8G")

    monkeypatch.setattr(compile_only, "compile_step", compile_step)
    config = PretrainingConfig(input_file="x", output_dir="y", train_batch_size=8)
    target = Target("tpu", ("device",), ACCELERATORS["v5e"], "v5e:1")
    with pytest.raises(InputError, match=r"=v5e:1\. Received: 1, for which one needs 9G and has 8G\."):
        compile_only.find_largest(Run(config, target=target))


def test_a_forecast_is_of_the_peak():
    device = types.SimpleNamespace(device_kind="TPU v5 lite")
    target = Target("tpu", (device,), ACCELERATORS["v5e"])
    known = {"estimated_seconds": 0.5, "matmul_flops": 197e11, "kernels": 0}
    figures = compile_only.forecast(known, target)
    assert figures["peak_share"] == pytest.approx(0.2)
    assert (figures["device_kind"], figures["device_memory_bytes"]) == ("TPU v5 lite", 16 << 30)
    for unknown in ({"estimated_seconds": None}, {"matmul_flops": None}, {"kernels": 1}):
        assert compile_only.forecast({**known, **unknown}, target)["peak_share"] is None


def test_figures_in_units_for_people():
    shown = {
        ("peak_bytes", 3 << 29): "1,536.0 MiB",
        ("matmul_flops", 4.25e12): "4,250.0 GFLOP",
        ("peak_share", 0.26523): "26.5 %",
        ("estimated_seconds", 0.08984): "89.84 ms",
        ("compile_seconds", 12.3456): "12.3 s",
        ("programs", 1): "1",
        ("device_kind", "TPU v5 lite"): "TPU v5 lite",
        ("flops", None): "not told",
    }
    assert {case: compile_only.in_units(*case) for case in shown} == shown


COUNT_DEVICES = """
import keras
from bert_packed.training.backend import make_virtual_devices
make_virtual_devices(3)
if keras.backend.backend() == "jax":
    import jax
    print(len(jax.devices()), {device.platform for device in jax.devices()})
else:
    import tensorflow as tf
    devices = tf.config.list_logical_devices()
    print(len(devices), {device.device_type.lower() for device in devices})
"""


@pytest.mark.slow
@pytest.mark.both_backends
def test_a_process_has_the_devices_that_it_asked_for():
    command = [sys.executable, "-c", COUNT_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.stdout == "3 {'cpu'}\n", done.stderr
