"""Programs as XLA prints them: shapes, rounds of loops, groups, FLOPs of products and kernels."""

# ruff: noqa: E501  a line of XLA stays one

import pytest

from bert_packed.training.program_text import (
    executions,
    loop_share,
    read_group_size,
    read_module,
    trip_count,
)
from bert_packed.training.step_report import matmul_flops

# It has loops in loops, a fusion, a branch, an asynchronous call; layouts and comments as on TPU and GPU
PROGRAM = """
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[2,3]{1,0})->f32[2,3]{1,0}}, num_partitions=4

FileNames
1 "step.py"

%wrapped (p.5: f32[2,3]) -> f32[2,3] {
  %p.5 = f32[2,3]{1,0} parameter(0)
  ROOT %sine = f32[2,3]{1,0} sine(%p.5)
}, execution_thread="other"

%below_five (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %five = s32[] constant(5)
  %seven = s32[] constant(7)
  %one = pred[] compare(%p, %five), direction=LT
  %other = pred[] compare(%seven, %p), direction=GT
  ROOT %both = pred[] and(%one, %other)
}

%inner_condition (t: (s32[], f32[2,3])) -> pred[] {
  %t = (s32[], f32[2,3]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(4)
  ROOT %less = pred[] fusion(%i, %limit), kind=kLoop, calls=%below_five
}

%inner_body (t.1: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %t.1 = (s32[], f32[2,3]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %x = f32[2,3]{1,0:T(8,128)S(1)} get-tuple-element(%t.1), index=1
  %tanh = f32[2,3]{1,0} tanh(f32[2,3]{1,0} %x), metadata={op_name="a) = while(b, calls=%wrapped"}
  ROOT %next = (s32[], /*index=1*/f32[2,3]{1,0}) tuple(%i.1, /*index=1*/%tanh)
}

%outer_body (u: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %u = (s32[], f32[2,3]{1,0}) parameter(0)
  %y = f32[2,3]{1,0} get-tuple-element(%u), index=1
  %zero = s32[] constant(0)
  %copied = s32[] copy(%zero)
  %start = (s32[], f32[2,3]{1,0}) tuple(%copied, %y)
  ROOT %inner = (s32[], f32[2,3]{1,0}) while(%start), condition=%inner_condition, body=%inner_body, backend_config={"known_induction_variable":{"tuple_index":"0"}}
}

%outer_condition (u.1: (s32[], f32[2,3])) -> pred[] {
  %u.1 = (s32[], f32[2,3]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[2,3]) -> f32[2,3] {
  %a = f32[2,3]{1,0} parameter(0)
  %begun = ((f32[2,3]{1,0}), f32[2,3]{1,0}, u32[]{:S(2)}) async-start(%a), calls=%wrapped
  %done = f32[2,3]{1,0} async-done(%begun), calls=%wrapped
  %branch = f32[2,3]{1,0} conditional(%which, %a, %a), branch_computations={%wrapped, %wrapped}
  %w = (s32[], f32[2,3]{1,0}) while(%tuple.1), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[2,3]{1,0} get-tuple-element(%w), index=1
}
"""


def times_of(module, opcode):
    return [times for one, times in executions(module) if one.opcode == opcode]


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        (("", ""), 5),
        (("constant(5)", "parameter(1)"), 4),  # handed in by the caller
        (("direction=LT", "direction=NE"), 7),  # what is no limit does not count
        (("constant(0)", "constant(1)"), None),  # it starts elsewhere
        (("constant(5)", "add(%p, %p)"), 7),  # one of the limits is no constant: at most the other
    ],
)
def test_rounds_of_a_loop_from_its_condition(change, rounds):
    module = read_module(PROGRAM.replace(*change))
    assert trip_count(module, module.root("outer_body")) == rounds
    assert times_of(module, "tanh") == [rounds and 3 * rounds]  # within 3 rounds of another
    # The asynchronous call counts once, and so do both branches
    assert times_of(module, "sine") == [1] * 3


@pytest.mark.parametrize(
    ("text", "num_bytes", "is_dynamic"),
    [
        ("f32[2,3]{1,0}", 24, False),
        ("bf16[7]", 14, False),
        ("s4[3]", 2, False),
        ("pred[]", 1, False),
        ("f32[<=5,3]", 60, True),
        ("f32[?,3]", 12, True),
    ],
)
def test_bytes_of_a_shape(text, num_bytes, is_dynamic):
    module = read_module(f"ENTRY main {{\n  x = {text} parameter(0)\n}}")
    (shape,) = module.root("main").shapes
    assert (shape.num_bytes, shape.is_dynamic) == (num_bytes, is_dynamic)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("channel_id=1, replica_groups={{0,1,4},{2,3,5}}, to_apply=%add", 3),
        ("channel_id=1, to_apply=%add", 8),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", 4),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", 2),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%a", 4),
        # 4 follow a first 2 of an axis of 16
        ("replica_groups=mesh['x'=16] {'x':(2)4}", 4),
        ("replica_groups=mesh['x'=16,'y'=3] {'x':(1)2,'x':(4)4,'y'}", 24),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", 4),
        ("source_target_pairs={{0,2},{2,0},{1,3}}", 2),
    ],
)
def test_every_form_of_groups(text, size):
    assert read_group_size(f", {text}", 8) == size


def test_a_form_of_groups_that_is_unknown_is_an_error():
    with pytest.raises(ValueError, match=r"must have a known form. Received: \?"):
        read_group_size("replica_groups=?1,2?", 8)


# The compiler for TPUs prints a loop so: no count, copies, the counter compared and raised
LOOP = """
%condition (s: (s32[], f32[4])) -> pred[] {
  %limit = s32[] constant(6)
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %copy = s32[] copy(%j)
  %one = s32[] constant(1)
  %next = s32[] add(%copy, %one)
  %x = f32[4] get-tuple-element(%t), index=1
  %y = f32[4] negate(%x), backend_config={"estimated_cycles":"50"}
  ROOT %r = (s32[], f32[4]) tuple(%next, %y)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %b = f32[4] negate(%a), backend_config={"estimated_cycles":"100"}
  %state = (s32[], f32[4]) tuple(%start, %b)
  %loop = (s32[], f32[4]) while(%state), condition=%condition, body=%body
  ROOT %e = f32[4] get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        (("", ""), 6),
        (("%one = s32[] constant(1)", "%one = s32[] constant(2)"), None),
        (("%zero = s32[] constant(0)", "%zero = s32[] constant(3)"), None),
        (("%next = s32[] add(%copy, %one)", "%next = s32[] subtract(%copy, %one)"), None),
        (("direction=LT", "direction=NE"), None),
    ],
)
def test_rounds_of_a_loop_without_their_number(change, rounds):
    module = read_module(LOOP.replace(*change))
    (loop,) = [one for one in module.instructions if one.opcode == "while"]
    assert trip_count(module, loop) == rounds
    assert loop_share(module) == (rounds and (100 + 6 * 50) / 150)
    assert loop_share(read_module(LOOP.replace("estimated_cycles", "other"))) is None


def module_of(*lines):
    return read_module("\n".join(["ENTRY %main () -> f32[] {", *lines, "}"]))


FOR_TPUS = '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"96","transcendentals":"5"}}}'


@pytest.mark.parametrize(
    ("left", "right", "result", "window", "labels", "flops"),
    [
        # The compiler for TPUs writes products of [8 * 128, 32] and [32, 64] so
        ("8,128,32", "32,64,1", "8,128,64", "size=1", "0bf_io0->0bf", 2 * 8 * 128 * 32 * 64),
        # This one sums over the window: of [32, 8 * 128] and [8 * 128, 64]
        ("8,128,32", "8,128,64", "32,64,1", "size=8", "0fb_0io->bf0", 2 * 8 * 128 * 32 * 64),
        # A batch is 8 * 2: each place of the window meets one input, as the others are dilation
        (
            *("8,2,64,32", "8,2,64,16", "8,2,32,16", "size=8x2 stride=7x1 lhs_dilate=8x2"),
            *("01fb_01io->01bf", 2 * 8 * 2 * 32 * 64 * 16),
        ),
        # These are convolutions proper: with padding there is no operation
        ("1,5,2", "4,2,3", "1,5,3", "size=4 pad=1_2", "b0f_0io->b0f", 2 * (3 + 4 + 4 + 3 + 2) * 2 * 3),
        # Each of 6 channels has its own, as Mamba's
        (
            *("2,9,6", "4,1,6", "2,9,6", "size=4 pad=3_0"),
            *("b0f_0io->b0f, feature_group_count=6", 2 * 2 * (1 + 2 + 3 + 6 * 4) * 6),
        ),
    ],
)
def test_operations_of_a_convolution(left, right, result, window, labels, flops):
    text = f"convolution(%l, %r), window={{{window}}}, dim_labels={labels}"
    module = module_of(
        f"%l = f32[{left}] parameter(0)", f"%r = f32[{right}] parameter(1)", f"ROOT %c = f32[{result}] {text}"
    )
    assert matmul_flops(module) == flops


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
