"""Devices of a process and of `--compile_for`: the flag, what it needs, and the platform that decides."""

import importlib.util

import keras
import pytest

from bert_packed.core.settings import InputError
from bert_packed.parallel import targets
from bert_packed.runs.pretraining_config import PretrainingConfig


@pytest.mark.parametrize(
    ("devices", "platform"),
    [(["cpu:0", "cpu:1"], "cpu"), (["CPU:0", "GPU:0"], "gpu"), (["tpu:0", "tpu:1"], "tpu")],
)
def test_one_device_that_is_no_cpu_decides(monkeypatch, devices, platform):
    monkeypatch.setattr(keras.distribution, "list_devices", lambda *of: devices)
    found = targets.devices_here()
    assert (found.platform, found.devices, found.num_devices) == (platform, None, None)
    assert ("xla_disable_hlo_passes" in found.compiler_options) == (platform == "cpu")


def test_a_compiler_measures_on_no_device_that_is_not_there():
    options = targets.Target("gpu").compiler_options
    assert "xla_gpu_autotune_level" not in options
    assert targets.Target("gpu", ("device",)).compiler_options == {**options, "xla_gpu_autotune_level": "0"}
    assert targets.Target("tpu", ("device",)).compiler_options == {}


@pytest.mark.parametrize("text", ["v5e", "v5e:", "v4:1", "v5e:0", "v5e:2x", "v5e:1x1x1x1", "h100:-1"])
def test_a_target_of_another_form_is_refused(text):
    with pytest.raises(InputError, match="empty or KIND:SHAPE as v5e:1") as caught:
        PretrainingConfig(input_file="x", compile_only="y", compile_for=text)
    assert f"Received: {text!r}" in str(caught.value)


def test_compile_for_needs_other_flags():
    given = {"input_file": "x", "output_dir": "z"}
    with pytest.raises(InputError, match="`compile_for` must be given with --compile_only only"):
        PretrainingConfig(**given, compile_for="v5e:1")
    with pytest.raises(InputError, match="`largest_micro_batch` must be given with --compile_for only"):
        PretrainingConfig(**given, compile_only="y", largest_micro_batch=True)
    with pytest.raises(InputError, match="`num_virtual_devices` must be 0 with compile_for"):
        PretrainingConfig(**given, compile_only="y", compile_for="v5e:2x2", num_virtual_devices=4)
    for text in ("v5e:1", "v5e:4x4", "v5p:2x2x1", "h100:4"):
        assert PretrainingConfig(**given, compile_only="y", compile_for=text).compile_for == text


@pytest.mark.parametrize(
    ("text", "package"), [("v5e:1", "jax"), ("v5e:1", "libtpu"), ("h100:1", "jax_cuda13_plugin")]
)
def test_what_is_missing_is_named(monkeypatch, text, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(InputError, match=r"needs `pip install -e '\.\[aot\]'`\.") as caught:
        targets.absent_target(text)
    assert f"Received: {text}, and no package {package}." in str(caught.value)


def test_a_tpu_has_the_topology_of_its_kind():
    one = {"chips_per_host_bounds": (1, 1, 1), "num_slices": 1, "wrap": (False, False, False)}
    topology = targets._tpu_topology
    v5e, v5p = targets.ACCELERATORS["v5e"], targets.ACCELERATORS["v5p"]
    assert topology(v5e, [1]) == {"topology_name": "v5e:1x1", "chip_config_name": "default", **one}
    assert topology(v5p, [1]) == {"topology_name": "v5:1x1x1", "chip_config_name": "megacore", **one}
    assert topology(v5p, [2, 2, 1]) == {"topology_name": "v5:2x2x1", "chip_config_name": "megacore"}
