"""Fused attention for GPU and TPU equals the dense path, run as plain JAX; and which kernels a model gets."""

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
from bert_packed.evaluation import pack_coverage
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


def dense_attention(query_BSNH, key_BSNH, value_BSNH, sequence_ids_BS):
    """The definition: scores, mask, softmax, mean."""
    scores_BNSS = jax.numpy.einsum("bsnh,btnh->bnst", query_BSNH, key_BSNH)
    mask_B1SS = sequence_ids_BS[:, None, :, None] == sequence_ids_BS[:, None, None, :]
    probs_BNSS = jax.nn.softmax(jax.numpy.where(mask_B1SS, scores_BNSS, -1e9), axis=-1)
    return jax.numpy.einsum("bnst,btnh->bsnh", probs_BNSS, value_BSNH)


def interpret(monkeypatch):
    """Let the kernel for GPUs run as plain JAX on this machine, in fewer steps than there."""
    from bert_packed.kernels.gpu import attention as gpu_attention  # needs JAX

    monkeypatch.setattr(gpu_attention, "TILES", dict.fromkeys(gpu_attention.TILES, 128))
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))


def run_kernel(monkeypatch, platform, function):
    """`function(attend)` with a kernel that runs as plain JAX on this machine."""
    if platform == "gpu":
        interpret(monkeypatch)
        return function(kernels.KERNELS["gpu"]["attend"])
    from jax.experimental.pallas import tpu

    with tpu.force_tpu_interpret_mode():
        return function(kernels.KERNELS["tpu"]["attend"])


@pytest.fixture(scope="module")
def packs():
    """Three packs: of three sequences with padding, of two that fill it, and of nothing but padding."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(3, LENGTH, 2, 16)).astype(np.float32) for _ in range(4)]
    ids_BS = np.zeros((3, LENGTH), np.int32)
    for row, lengths in enumerate([[100, 1, 90], [200, 56]]):
        ids_BS[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    assert [len(set(ids[ids > 0])) for ids in ids_BS] == [3, 2, 0]
    return arrays, ids_BS


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_kernel_equals_the_dense_path(monkeypatch, packs, platform):
    (query, key, value, weights), ids_BS = packs

    def outputs_and_gradients(attend):
        def target(*arrays):
            context = attend(*arrays, ids_BS)
            return (context * weights).sum(), context

        gradients, context = jax.grad(target, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return [np.asarray(values) for values in (context, *gradients)]

    want = outputs_and_gradients(dense_attention)
    for got, expected in zip(run_kernel(monkeypatch, platform, outputs_and_gradients), want, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_kernel_lets_nothing_through(monkeypatch, packs, platform):
    """A sequence's outputs stay bit for bit when its neighbours change, and it has no gradient on them."""
    (query, key, value, weights), ids_BS = packs
    mine_BS = ids_BS == 2
    others = ~mine_BS[:, :, None, None]
    other_key, other_value = (np.where(others, values[::-1] * 3, values) for values in (key, value))

    def outputs_and_gradients(attend):
        def target(key, value):
            return (attend(query, key, value, ids_BS) * weights * ~others).sum()

        contexts = [attend(query, *pair, ids_BS) for pair in ((key, value), (other_key, other_value))]
        gradients = jax.grad(target, argnums=(0, 1))(key, value)
        return [np.asarray(context)[mine_BS] for context in contexts], [np.asarray(g) for g in gradients]

    contexts, gradients = run_kernel(monkeypatch, platform, outputs_and_gradients)
    np.testing.assert_array_equal(*contexts)
    for gradient in gradients:
        assert np.all(gradient[~mine_BS] == 0) and np.abs(gradient[mine_BS]).max() > 1e-2


def abstract_gpu():
    """A context in which JAX lowers for a GPU that is not here; from 0.11 it asks which one."""
    h100 = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 132, "platform": "gpu"}
    fields = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}  # 0.10 has no platform
    device = jax.sharding.AbstractDevice(**{name: h100[name] for name in fields})
    mesh = jax.sharding.AbstractMesh(
        (1,), ("gpus",), (jax.sharding.AxisType.Explicit,), abstract_device=device
    )
    return jax.sharding.use_abstract_mesh(mesh)


def lower(platform, dtype):
    """The program of a kernel at the shapes of bert-base, forward and backward: str.

    As far as a machine without the accelerator can go.
    """
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


def test_without_triton_a_gpu_attends_densely(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    chosen = kernels.choose_kernels("auto", CONFIG, 512, "gpu")
    assert not chosen.options and "dense: no flash where JAX has no Pallas for Triton" in chosen.description
    assert not kernels.choose_kernels("auto", MAMBA, 512, "gpu").options
    with pytest.raises(InputError, match="`attention` must not be flash where JAX has no Pallas for Triton"):
        kernels.choose_kernels("flash", CONFIG, 512, "gpu")


@pytest.mark.parametrize(
    ("platform", "config", "length", "reason"),
    [
        (
            "tensorflow",
            CONFIG,
            512,
            "the platform is not a GPU or TPU under KERAS_BACKEND=jax. Received: tens",
        ),
        ("cpu", CONFIG, 512, "the platform is not a GPU or TPU under KERAS_BACKEND=jax. Received: cpu"),
        ("tpu", CONFIG, 500, "128 does not divide the length of packs. Received: 500"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_or_left_to_the_dense_path(
    monkeypatch, platform, config, length, reason
):
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow" if platform == "tensorflow" else "jax")
    with pytest.raises(InputError, match="`attention` must not be flash where") as caught:
        kernels.choose_kernels("flash", config, length, platform)
    assert reason in str(caught.value)
    chosen = kernels.choose_kernels("auto", config, length, platform)
    assert not chosen.options
    # Only who has the hardware wants to know
    assert (reason in chosen.description) == (platform in ("gpu", "tpu"))


def test_dropout_is_never_left_out_silently():
    layer = SelfAttention(WITH_DROPOUT, attend=lambda query, key, value, ids: value)
    hidden, context = np.zeros((1, 4, 16), np.float32), PackContext(np.ones((1, 4), np.int32), None)
    assert layer(hidden, context=context, training=False).shape == (1, 4, 16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
        layer(hidden, context=context, training=True)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("config", [CONFIG, WITH_DROPOUT], ids=["without", "with_dropout"])
def test_the_kernel_is_taken_where_it_can_do_the_work(monkeypatch, platform, config):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    for attention in ("auto", "flash"):
        chosen = kernels.choose_kernels(attention, config, 512, platform)
        assert chosen.options == {"attend": kernels.KERNELS[platform]["attend"]}
        assert "flash" in chosen.description
    assert not kernels.choose_kernels("dense", CONFIG, 512, platform).options


PLAIN = "none: states go from token to token"


@pytest.mark.parametrize(
    ("platform", "config", "names", "description"),
    [
        ("gpu", MAMBA, ["scan"], "; scan in fused GPU kernels of Pallas"),
        ("tpu", MAMBA, ["convolve", "scan"], "; convolution and scan in fused TPU kernels of Pallas"),
        ("gpu", MAMBA2, [], ""),
        ("tpu", MAMBA2, ["convolve", "duality"], "; convolution and scan in fused TPU kernels of Pallas"),
    ],
)
def test_a_mamba_gets_the_kernels_of_its_operators(monkeypatch, platform, config, names, description):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    chosen = kernels.choose_kernels("auto", config, 500, platform)
    assert chosen.options == {name: kernels.KERNELS[platform][name] for name in names}
    assert chosen.description == PLAIN + description
    check_options(config, **chosen.options)
    plain = kernels.Kernels({}, PLAIN)
    assert kernels.choose_kernels("dense", config, 512, platform) == plain
    assert kernels.choose_kernels("auto", config, 512, "cpu") == plain
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    assert kernels.choose_kernels("auto", config, 512, platform) == plain


def test_kernels_have_the_tiles_that_the_audit_covers():
    assert {gpu_scan.CHUNK_LENGTH, tpu_scan.CHUNK_LENGTH, tpu_duality.CHUNK_LENGTH} == {kernels.TILE}
    assert {kernels.TILE, min(gpu_attention.TILES.values())} == {*pack_coverage.TILES}


@pytest.mark.both_backends
@needs_jax
def test_the_audit_passes_with_the_kernel(monkeypatch, tmp_path, capsys):
    """From packs on disk to the table, compiled; and one that leaks fails."""
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
