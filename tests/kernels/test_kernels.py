"""Choice of kernels by device and model, lowering for devices that are not here, and the audit with one."""

import contextlib
import dataclasses
import functools

import keras
import numpy as np
import pytest
from next_tokens import CONFIG as MAMBA
from next_tokens import MAMBA2
from packs import random_packs, write_packs
from tiny import CONFIG, make_engine

from bert_packed import cli
from bert_packed.architectures.bert.layers import SelfAttention
from bert_packed.architectures.packed_model import check_options
from bert_packed.checkpoints import checkpoint
from bert_packed.core import command_line
from bert_packed.core.settings import InputError
from bert_packed.evaluation import checkpoint_audit
from bert_packed.evaluation.checkpoint_audit import AuditConfig
from bert_packed.kernels import choose as kernels
from bert_packed.layers.context import PackContext
from bert_packed.parallel import targets

jax = pytest.importorskip("jax", reason="pip install -e '.[jax]'")
from jax.experimental import pallas  # noqa: E402

from bert_packed.kernels.gpu import attention as gpu_attention  # noqa: E402
from bert_packed.kernels.gpu import selective_scan as gpu_scan  # noqa: E402
from bert_packed.kernels.tpu import duality as tpu_duality  # noqa: E402
from bert_packed.kernels.tpu import selective_scan as tpu_scan  # noqa: E402

needs_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")

LENGTH = 256  # two tiles
WITH_DROPOUT = dataclasses.replace(CONFIG, attention_probs_dropout_prob=0.1)


def interpret(monkeypatch):
    """Let the kernel for GPUs run as plain JAX on this machine, in fewer steps than there."""
    monkeypatch.setattr(gpu_attention, "TILES", dict.fromkeys(gpu_attention.TILES, 128))
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def abstract_gpu():
    """A context in which JAX lowers for a GPU that is not here; from 0.11 it asks which one."""
    h100 = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "platform": "gpu"}
    fields = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}  # 0.10 has no platform
    device = jax.sharding.AbstractDevice(**{name: h100[name] for name in fields})
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ("gpus",), explicit, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lower(platform, dtype):
    """The program of a kernel at the shapes of bert-base, as far as it goes without the accelerator."""
    attend = kernels.KERNELS[{"cuda": "gpu"}.get(platform, platform)]["attend"]

    def gradients(query, key, value, ids_BS):
        def target(*arrays):
            return attend(*arrays, ids_BS).astype("float32").sum()

        return jax.grad(target, argnums=(0, 1, 2))(query, key, value)

    tokens = jax.ShapeDtypeStruct((8, 512, 12, 64), dtype)
    ids_BS = jax.ShapeDtypeStruct((8, 512), "int32")
    calls = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("__gpu$xla.gpu.triton",)]
    exported = jax.export.export(jax.jit(gradients), platforms=[platform], disabled_checks=calls)
    with abstract_gpu() if platform == "cuda" else contextlib.nullcontext():
        return exported(tokens, tokens, tokens, ids_BS).mlir_module()


@pytest.mark.both_backends  # by the newest JAX, too
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_for_tpus_lowers(dtype):
    assert "tpu_custom_call" in lower("tpu", dtype)


@pytest.mark.both_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_has_triton_and_from_which_version_it_warns(dtype):
    """The deprecated door to it: in JAX 0.10 to 0.12, from 0.11 with the announcement that it will close."""
    assert (0, 10) <= jax.__version_info__ < (0, 13) and kernels.has_triton()
    announced = pytest.warns(DeprecationWarning, match="The Pallas Triton backend is deprecated")
    with announced if jax.__version_info__ >= (0, 11) else contextlib.nullcontext():
        assert "xla.gpu.triton" in lower("cuda", dtype)


def test_dropout_is_never_left_out_silently():
    layer = SelfAttention(WITH_DROPOUT, attend=lambda query, key, value, ids: value)
    hidden, context = np.zeros((1, 4, 16), np.float32), PackContext(np.ones((1, 4), np.int32), None)
    assert layer(hidden, context=context, training=False).shape == (1, 4, 16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        layer(hidden, context=context, training=True)


PLAIN = "none: states go from token to token"
BOTH = "; convolution and scan in fused TPU kernels of Pallas"
NO_TRITON = "JAX has no Pallas for Triton"
ELSEWHERE = "the platform is not a GPU or TPU under KERAS_BACKEND=jax. Received: "


@pytest.mark.parametrize(
    ("platform", "config", "names", "description"),
    [
        ("gpu", CONFIG, ["attend"], "flash: the fused GPU kernel of Pallas"),
        ("tpu", WITH_DROPOUT, ["attend"], "flash: the fused TPU kernel of Pallas"),
        ("gpu", MAMBA, ["scan"], PLAIN + "; scan in fused GPU kernels of Pallas"),
        ("tpu", MAMBA, ["convolve", "scan"], PLAIN + BOTH),
        ("gpu", MAMBA2, [], PLAIN),
        ("tpu", MAMBA2, ["convolve", "duality"], PLAIN + BOTH),
        ("cpu", MAMBA, [], PLAIN),
    ],
)
def test_a_model_gets_the_kernels_of_its_operators(monkeypatch, platform, config, names, description):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    length = 512 if names == ["attend"] else 500
    chosen = kernels.choose_kernels("auto", config, length, platform)
    assert chosen.options == {name: kernels.KERNELS[platform][name] for name in names}
    assert chosen.description.startswith(description)
    check_options(config, **chosen.options)
    assert not kernels.choose_kernels("dense", config, length, platform).options
    if names == ["attend"]:
        assert kernels.choose_kernels("flash", config, length, platform) == chosen
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    assert not kernels.choose_kernels("auto", config, length, platform).options


@pytest.mark.parametrize(
    ("platform", "backend", "length", "has_triton", "reason"),
    [
        ("gpu", "tensorflow", 512, True, ELSEWHERE + "tens"),
        ("cpu", "jax", 512, True, ELSEWHERE + "cpu"),
        ("tpu", "jax", 500, True, "128 does not divide the length of packs. Received: 500"),
        ("gpu", "jax", 512, False, NO_TRITON),
    ],
)
def test_without_a_kernel_flash_is_refused(monkeypatch, platform, backend, length, has_triton, reason):
    """Left to choose, the model attends densely; whoever has the hardware gets to know why."""
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    monkeypatch.setattr(kernels, "has_triton", lambda: has_triton)
    with pytest.raises(InputError, match="`attention` must not be flash where") as caught:
        kernels.choose_kernels("flash", CONFIG, length, platform)
    assert reason in str(caught.value)
    chosen = kernels.choose_kernels("auto", CONFIG, length, platform)
    assert not chosen.options
    assert has_triton or not kernels.choose_kernels("auto", MAMBA, length, platform).options
    assert (reason in chosen.description) == (backend == "jax" and platform in ("gpu", "tpu"))


def test_kernels_have_the_tiles_that_the_audit_covers():
    assert {gpu_scan.CHUNK_LENGTH, tpu_scan.CHUNK_LENGTH, tpu_duality.CHUNK_LENGTH} == {kernels.TILE}
    assert {kernels.TILE, min(gpu_attention.TILES.values())} == {*checkpoint_audit.TILES}


@pytest.mark.both_backends
@needs_jax
def test_the_audit_passes_with_the_kernel(monkeypatch, tmp_path, capsys):
    """It goes from packs on disk to the table, compiled; and a kernel that leaks fails."""
    interpret(monkeypatch)
    kernel = kernels.KERNELS["gpu"]["attend"]
    monkeypatch.setattr(targets, "devices_here", lambda: targets.Target("gpu"))
    config = dataclasses.replace(WITH_DROPOUT, max_position_embeddings=LENGTH, num_hidden_layers=1)
    rng = np.random.default_rng(0)
    write_packs(tmp_path / "packs.tfrecord", random_packs(rng, 2, LENGTH), LENGTH, num_predictions=99)
    checkpoint.save_weights(tmp_path / "model", make_engine(config=config).weights(), config)
    flags = {
        "input_file": f"{tmp_path}/*.tfrecord",
        "init_checkpoint": tmp_path / "model",
        "num_packs": 2,
        "attention": "flash",
    }
    command = ["audit", *(f"--{name}={value}" for name, value in flags.items())]
    for attend, status in ((kernel, 0), (lambda q, k, v, ids: kernel(q, k, v, ids * 0), 1)):
        monkeypatch.setitem(kernels.KERNELS["gpu"], "attend", attend)
        assert command_line.run(cli.audit, AuditConfig, command) == status
        assert "attention: flash: the fused GPU kernel" in capsys.readouterr().out
