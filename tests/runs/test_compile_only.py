"""`--compile_only`: files, exit status, what it leaves alone, the largest micro-batch, virtual devices."""

import json
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import recorded_calls
from recorded_calls import assert_refused
from tiny import CONFIG, make_engine, write_data

from bert_packed import cli
from bert_packed.core.settings import InputError
from bert_packed.objectives.features import RECORDED
from bert_packed.parallel.targets import ACCELERATORS, Target
from bert_packed.runs import compile_only
from bert_packed.runs.compile_only import STATUS_NOT_STATIC, empty_batch
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
    """A compiler that gives `programs`; the batches that it was called with, and the numbers of devices."""
    asked = types.SimpleNamespace(batches=[], devices=[])
    asked.programs = [StepProgram(TEXT, 2.5, flops=24.0, bytes_accessed=96.0)]
    engine = make_engine()
    engine.step_programs = lambda batch: asked.batches.append(batch) or asked.programs
    monkeypatch.setattr(compile_only, "build_engine", lambda *_, target: engine)
    monkeypatch.setattr(compile_only, "make_virtual_devices", asked.devices.append)
    return asked


def flags_of(data, **flags):
    files = {"input_file": f"{data}/packed-*.tfrecord", "bert_config_file": f"{data}/bert_config.json"}
    return {**files, "train_batch_size": 4, **flags}


def run(data, **flags):
    return recorded_calls.run(cli.pretrain, PretrainingConfig, **flags_of(data, **flags))


def test_what_it_writes_and_says(data, asked, tmp_path):
    target = tmp_path / "new" / "compiled"
    seen = run(data, compile_only=target, num_virtual_devices=2)
    assert seen.status == 0 and asked.devices == [2]
    assert {path.name for path in target.iterdir()} == {"step.hlo.txt", "step.json"}
    assert (target / "step.hlo.txt").read_text() == TEXT
    report = json.loads((target / "step.json").read_text())
    names = ("backend", "programs", "devices", "flops", "compile_seconds")
    assert [report[name] for name in names] == [keras.backend.backend(), 1, 2, 24.0, 2.5]
    assert report["temporary_bytes"] is None and report["collective_bytes"] == 96
    assert report["versions"]["keras"] == keras.__version__
    assert all(text in seen.out for text in ("host callbacks", "not told", "all-reduce", "2.5 s"))
    (batch,) = asked.batches
    assert batch.keys() == {feature.name for feature in RECORDED} and len(batch["token_ids"]) == 4


def test_the_batch_is_one_of_the_pipeline(data, tmp_path):
    from bert_packed.data.batches import CheckedBatches
    from bert_packed.data.input_pipeline import train_batches

    files = read_data(
        PretrainingConfig(input_file=f"{data}/packed-*.tfrecord", output_dir=str(tmp_path))
    ).train
    dataset = train_batches(files.index, files.spec, 4, seed=1, shuffle_buffer_size=1)
    real = next(iter(CheckedBatches(dataset, files.files, files.spec, CONFIG)))
    ours = empty_batch(RECORDED, files.spec, 4)
    assert {n: (v.shape, v.dtype) for n, v in ours.items()} == {
        n: (v.shape, v.dtype) for n, v in real.items()
    }
    assert not any(np.any(values) for values in ours.values())


def test_a_step_that_is_not_static_is_no_success(data, asked, tmp_path):
    asked.programs = [StepProgram(TEXT.replace("  ROOT", CALLBACK), 1.0)]
    seen = run(data, compile_only=tmp_path / "a")
    assert seen.status == STATUS_NOT_STATIC and "not static: %h = () custom-call" in seen.out
    assert json.loads((tmp_path / "a" / "step.json").read_text())["host_callbacks"] == 1
    asked.programs = [StepProgram(TEXT, 1.0), StepProgram(TEXT, 1.0)]
    assert run(data, compile_only=tmp_path / "b").status == STATUS_NOT_STATIC
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"step-0.hlo.txt", "step-1.hlo.txt", "step.json"}


def test_a_run_is_left_alone(data, asked, tmp_path):
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    (output_dir / "run.json").write_text("{}")
    for folder in (output_dir, tmp_path / "none"):
        assert run(data, output_dir=folder, compile_only=tmp_path / "compiled", overwrite=True).status == 0
    assert {path.name: path.read_text() for path in output_dir.iterdir()} == {"run.json": "{}"}
    assert not (tmp_path / "none").exists()
    # Its next start would find files of others there
    seen = run(data, compile_only=output_dir)
    assert seen.status == 2 and "`compile_only` must not be the output_dir of a run" in seen.error
    assert [path.name for path in output_dir.iterdir()] == ["run.json"]


def test_shapes_need_no_pass_over_the_data(data, tmp_path, asked):
    """Of a file only its first record is read: one that is cut off later will do."""
    whole = (data / "packed-0.tfrecord").read_bytes()
    (tmp_path / "cut.tfrecord").write_bytes(whole[:-10])
    assert run(data, input_file=tmp_path / "cut.tfrecord", compile_only=tmp_path / "compiled").status == 0


def test_a_mistake_is_one_line(data, asked, tmp_path):
    (tmp_path / "file").write_text("")
    new = tmp_path / "new"
    for flags, message in (
        ({"compile_only": tmp_path / "file"}, "`compile_only` must be a folder. Received: "),
        ({"compile_only": new, "num_virtual_devices": 4}, "must be as many as the step runs on, which is 2"),
        ({"compile_only": new, "input_file": "none*"}, "`input_file` must match at least one file"),
    ):
        assert_refused(cli.pretrain, PretrainingConfig, message, **flags_of(data, **flags))
        assert not new.exists()


@pytest.mark.parametrize("limit", [1, 5, 13, 100])
@pytest.mark.parametrize("power", [1, 2])
def test_the_largest_micro_batch_is_found(monkeypatch, capsys, limit, power):
    """Of a device that takes `limit` packs at once, where four share a step."""
    tried = []
    has, arguments = ACCELERATORS["v5e"].memory_bytes, 1 << 30
    of_limit = has - (1 << 28) - arguments  # what `limit` packs need besides

    def compile_step(config, model_config, data, target):
        tried.append(config.packs_at_once // 4)
        assert config.packs_at_once % 4 == 0 and config.train_batch_size % config.packs_at_once == 0
        assert 0 <= config.train_batch_size - 64 < config.packs_at_once
        if tried[-1] > limit:
            raise compile_only.TooLargeError(target, config.packs_at_once, "9G", "8G")
        peak = arguments + int(of_limit * (tried[-1] / limit) ** power)
        return [types.SimpleNamespace(argument_bytes=arguments, peak_bytes=peak, packs=config.packs_at_once)]

    monkeypatch.setattr(compile_only, "compile_step", compile_step)
    growth = {"initial_batch_size": 32, "batch_warmup_steps": 5} if limit == 5 else {}
    config = PretrainingConfig(
        input_file="x", output_dir="y", train_batch_size=64, micro_batch_size=32, **growth
    )
    target = Target("tpu", ("device",) * 4, ACCELERATORS["v5e"], "v5e:2x2")
    found, (program,) = compile_only.find_largest(config, None, None, target)
    assert program.packs == found.packs_at_once and found.packs_at_once // 4 <= limit
    assert limit - found.packs_at_once // 4 <= limit / 16
    assert len(tried) == len(set(tried)) <= (7 if power == 1 else 8)
    assert f"too large  {4 * min(size for size in tried if size > limit)} packs" in capsys.readouterr().out


def test_where_not_one_pack_fits_it_says_so(monkeypatch):
    def compile_step(config, model_config, data, target):
        raise compile_only.TooLargeError(target, config.packs_at_once, "9G", "8G")

    monkeypatch.setattr(compile_only, "compile_step", compile_step)
    config = PretrainingConfig(input_file="x", output_dir="y", train_batch_size=8)
    with pytest.raises(InputError, match=r"=v5e:1\. Received: 1, for which one needs 9G and has 8G\."):
        target = Target("tpu", ("device",), ACCELERATORS["v5e"], "v5e:1")
        compile_only.find_largest(config, None, None, target)


def test_a_forecast_is_of_the_peak():
    device = types.SimpleNamespace(device_kind="TPU v5 lite")
    target = Target("tpu", (device,), ACCELERATORS["v5e"])
    known = {"estimated_seconds": 0.5, "matmul_flops": 197e11, "kernels": 0}
    figures = compile_only.forecast(known, target)
    assert figures["peak_share"] == pytest.approx(0.2)
    assert (figures["device_kind"], figures["device_memory_bytes"]) == ("TPU v5 lite", 16 << 30)
    for unknown in ({"estimated_seconds": None}, {"matmul_flops": None}, {"kernels": 1}):
        assert compile_only.forecast({**known, **unknown}, target)["peak_share"] is None


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
