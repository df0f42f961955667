"""`--compile_for`: the step of a tiny BERT, compiled for accelerators that are not here; refusals."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packs import random_packs, write_packs
from tiny import CONFIG

pytest.importorskip("libtpu", reason="pip install -e '.[aot]'")

ROOT = Path(__file__).parents[2]
LENGTH, PACKS, MICRO = 128, 8, 4
MODEL = dataclasses.replace(
    CONFIG,
    hidden_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=256,
    vocab_size=512,
    max_position_embeddings=LENGTH,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)
# A multiply-add is two operations, of the whole step and its three products of each: forward, and backward by
# both factors. A few tiny products of [CLS] become sums on a TPU
LAYER = 2 * (4 * 128 * 128 + 2 * 128 * 256 + 2 * LENGTH * 128)


def kernel_of(target):
    """XLA's name of the call of a Pallas kernel."""
    return "__gpu$xla.gpu.triton" if target.startswith("h100") else "tpu_custom_call"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Packs and the model's config."""
    folder = tmp_path_factory.mktemp("aot")
    packs = random_packs(np.random.default_rng(0), 4, LENGTH)
    write_packs(folder / "packed.tfrecord", packs, LENGTH, num_predictions=24)
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(MODEL)))
    return folder


def command(folder, target, backend="jax", start=(ROOT / "run_pretraining.py",), **flags):
    """`run_pretraining.py --compile_for` in a process: that, ended, and its report where there is one."""
    flags = {
        "input_file": folder / "packed.tfrecord",
        "bert_config_file": folder / "bert_config.json",
        "train_batch_size": PACKS,
        "micro_batch_size": MICRO,
        "compile_only": folder / "compiled",
        "compile_for": target,
        **flags,
    }
    (folder / "compiled" / "step.json").unlink(missing_ok=True)
    argv = [f"--{name}={value}" for name, value in flags.items()]
    # A user has none of the options that tests compile with
    ours = ("XLA_FLAGS", "TF_XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, *start, *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment | {"KERAS_BACKEND": backend},
    )
    written = folder / "compiled" / "step.json"
    return done, json.loads(written.read_text()) if written.exists() else None


@pytest.fixture(scope="module")
def flops(folder):
    """FLOPs of the products of a step on one device."""
    done, report = command(folder, "v5e:1", attention="dense")
    assert done.returncode == 0, done.stderr
    assert report["device_kind"] == "TPU v5 lite" and report["micro_batch_size"] == MICRO
    assert 0 < report["peak_share"] < 1 and report["estimated_seconds"] < 0.1
    check(report, 1)
    return report["matmul_flops"]


def check(report, num_devices):
    """A step that is static, donated and counted."""
    assert (report["programs"], report["devices"]) == (1, num_devices)
    assert report["dynamic_dimensions"] == report["host_callbacks"] == report["loops_of_unknown_length"] == 0
    # Weights and moments are written where they were read
    assert report["peak_bytes"] - report["temporary_bytes"] < 1.1 * report["argument_bytes"]
    assert report["peak_bytes"] < report["device_memory_bytes"]


def test_products_are_counted(flops):
    of_layers = 3 * PACKS * LENGTH * LAYER
    assert of_layers < flops < 1.5 * of_layers


@pytest.mark.parametrize(
    ("target", "flags", "kinds"),
    [
        ("v5e:2x2", {}, {"all-reduce"}),
        ("v5e:2x2", {"layout": "megatron1d", "mesh": "2,1,2"}, {"all-gather", "all-reduce"}),
        (
            "v5e:2x2",
            {"layout": "optimus2d", "mesh": "2,2", "attention": "dense"},
            {"all-gather", "reduce-scatter", "collective-permute", "all-reduce", "all-to-all"},
        ),
        ("v5p:2x2x1", {}, {"all-reduce"}),
        ("h100:4", {}, {"all-reduce"}),
    ],
)
def test_four_devices_share_a_step(folder, flops, target, flags, kinds):
    done, report = command(folder, target, **flags)
    assert done.returncode == 0, done.stderr
    check(report, 4)
    assert {row["kind"] for row in report["collectives"]} == kinds
    assert all(row["executions"] for row in report["collectives"])
    has_kernel = "attention" not in flags  # it computes scores twice, and for GPUs three times
    if has_kernel:
        assert flops < 4 * report["matmul_flops"] < 1.6 * flops and report["peak_share"] is None
    else:
        assert 4 * report["matmul_flops"] == pytest.approx(flops, rel=0.02)
    text = (folder / "compiled" / "step.hlo.txt").read_text()
    assert (kernel_of(target) in text) == has_kernel
    if not flags:  # all gradients at once, after all micro-batches
        assert [row["executions"] for row in report["collectives"]] == [2]


@pytest.mark.parametrize("target", ["v5e:1", "h100:1"])
def test_the_program_of_tensorflow(folder, flops, target):
    done, report = command(folder, target, "tensorflow")
    assert done.returncode == 0, done.stderr
    check(report, 1)
    # The compiler for TPUs chooses to compute one of TensorFlow's products again: a thirty-third of all
    assert report["matmul_flops"] == pytest.approx(flops, rel=0.04)
    assert report["collectives"] == []


@pytest.mark.parametrize("target", ["h100:1", "v6e:1"])
def test_the_fused_attention_in_float32(folder, target):
    done, report = command(folder, target, attention="flash", dtype="float32")
    assert done.returncode == 0, done.stderr
    check(report, 1)
    assert report["kernels"] > 0 and report["matmul_flops"] > 0
    assert kernel_of(target) in (folder / "compiled" / "step.hlo.txt").read_text()


@pytest.mark.parametrize(
    ("target", "packs", "micro"),
    [
        ("v5e:1", 1 << 23, MICRO),  # whose ids alone fill the memory, as libtpu sees at once
        ("h100:1", 1 << 18, 1 << 18),
    ],
)
def test_a_batch_that_is_too_large(folder, target, packs, micro):
    done, report = command(folder, target, train_batch_size=packs, micro_batch_size=micro)
    assert (done.returncode, report) == (2, None), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("run_pretraining.py")]
    assert f"small enough for the devices of compile_for={target}. Received: {micro}, for which" in line
    needs, has = (float(size) for size in re.findall(r"([\d.]+)G", line))
    assert needs > has > 15


def test_the_options_for_cpus_are_refused(folder):
    """A control: with them a rematerialised block keeps barriers that no GPU has."""
    code = (
        "import sys\n"
        "from bert_packed import cli\n"
        "from bert_packed.parallel.targets import Target\n"
        "Target.compiler_options = Target('cpu').compiler_options\n"
        "sys.exit(cli.run_command('pretrain'))"
    )
    done, report = command(folder, "h100:1", start=["-c", code], remat=True)
    assert (done.returncode, report) == (2, None)
    assert "Received: h100:1, which says INTERNAL: Unsupported instruction opcode: opt-barrier" in done.stderr
    done, report = command(folder, "h100:1", remat=True)
    assert done.returncode == 0 and report["matmul_flops"] > 0, done.stderr


def test_devices_that_cannot_be_compiled_for(folder):
    for target, backend, flags, message in (
        ("v5e:3x3", "jax", {}, "as their compiler knows them. Received: v5e:3x3"),
        ("v5e:2x2", "tensorflow", {}, "one device unless KERAS_BACKEND=jax"),
        (
            "v5e:2x2",
            "jax",
            {"layout": "megatron1d", "mesh": "1,2"},
            "must have all 4 devices of compile_for=",
        ),
    ):
        done, _ = command(folder, target, backend, **flags)
        assert done.returncode == 2 and message in done.stderr
