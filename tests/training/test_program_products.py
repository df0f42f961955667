"""FLOPs of products: convolutions as the compiler for TPUs writes them, kernels as they declare."""

# ruff: noqa: E501  a line of XLA stays one

import pytest

from bert_packed.training.program_text import read_module
from bert_packed.training.step_report import matmul_flops


def module_of(*lines):
    return read_module("\n".join(["ENTRY %main () -> f32[] {", *lines, "}"]))


FOR_TPUS = '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"96","transcendentals":"5"}}}'


@pytest.mark.parametrize(
    ("left", "right", "convolution", "flops"),
    [
        # Products as the compiler for TPUs writes them: of [8 * 128, 32] and [32, 64]
        (
            "8,128,32",
            "32,64,1",
            "f32[8,128,64] convolution(%l, %r), window={size=1}, dim_labels=0bf_io0->0bf",
            2 * 8 * 128 * 32 * 64,
        ),
        ("128,32", "32,64", "f32[128,64] convolution(%l, %r), dim_labels=bf_io->bf", 2 * 128 * 32 * 64),
        # summed over the window: of [32, 8 * 128] and [8 * 128, 64]
        (
            "8,128,32",
            "8,128,64",
            "f32[32,64,1] convolution(%l, %r), window={size=8}, dim_labels=0fb_0io->bf0",
            2 * 8 * 128 * 32 * 64,
        ),
        # a batch of 8 * 2: each place of the window meets one input, as the others are dilation
        (
            "8,2,64,32",
            "8,2,64,16",
            "f32[8,2,32,16] convolution(%l, %r), window={size=8x2 stride=7x1 lhs_dilate=8x2}, dim_labels=01fb_01io->01bf",
            2 * 8 * 2 * 32 * 64 * 16,
        ),
        # Convolutions proper: with padding there is no operation
        (
            "1,5,2",
            "4,2,3",
            "f32[1,5,3] convolution(%l, %r), window={size=4 pad=1_2}, dim_labels=b0f_0io->b0f",
            2 * (3 + 4 + 4 + 3 + 2) * 2 * 3,
        ),
        # one of each of 6 channels, as Mamba's
        (
            "2,9,6",
            "4,1,6",
            "f32[2,9,6] convolution(%l, %r), window={size=4 pad=3_0}, dim_labels=b0f_0io->b0f, feature_group_count=6",
            2 * 2 * (1 + 2 + 3 + 6 * 4) * 6,
        ),
        # every second place, of a kernel with gaps: inputs 0 2, 2 4, 4 6
        (
            "1,7,1",
            "2,1,1",
            "f32[1,3,1] convolution(%l, %r), window={size=2 stride=2 rhs_dilate=2}, dim_labels=b0f_0io->b0f",
            2 * 6,
        ),
    ],
)
def test_operations_of_a_convolution(left, right, convolution, flops):
    text = [f"%l = f32[{left}] parameter(0)", f"%r = f32[{right}] parameter(1)", f"ROOT %c = {convolution}"]
    assert matmul_flops(module_of(*text)) == flops


@pytest.mark.parametrize(
    ("target", "config", "flops"),
    [
        ("tpu_custom_call", FOR_TPUS, 96),
        ("tpu_custom_call", '{"custom_call_config":{"body":"x"}}', None),
        ("__gpu$xla.gpu.triton", r'{ir = "x", serialized_metadata = "{\22flops\22: \2296\22}"}', 96),
        ("__gpu$xla.gpu.triton", '{ir = "x", num_warps = 4 : i32}', None),
        ("mosaic_gpu_v2", FOR_TPUS, None),  # as the next, declares nothing
        ("__cudnn$convForward", FOR_TPUS, None),
    ],
)
def test_operations_of_a_kernel_are_as_it_declares(target, config, flops):
    text = f'ROOT %c = f32[4] custom-call(), custom_call_target="{target}", backend_config={config}'
    assert matmul_flops(module_of(text)) == flops
