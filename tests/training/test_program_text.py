"""Programs as XLA prints them: shapes, what calls what, how often loops run, collectives."""

# ruff: noqa: E501  a line of XLA stays one

import math
import os
import subprocess
import sys

import keras
import pytest

from bert_packed.training.program_text import (
    executions,
    find_collectives,
    loop_share,
    read_group_size,
    read_module,
    trip_count,
)

# Loops in loops, a fusion, a branch, an asynchronous call; layouts and comments as on TPU and GPU
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


@pytest.fixture(scope="module")
def module():
    return read_module(PROGRAM)


def times_of(module, opcode):
    return [times for one, times in executions(module) if one.opcode == opcode]


def test_what_a_line_says(module):
    assert module.entry == "main" and module.num_devices == 4
    assert list(module.computations) == [
        *("wrapped", "below_five", "inner_condition", "inner_body"),
        *("outer_body", "outer_condition", "main"),
    ]
    named = {one.name: one for one in module.instructions}
    root, tanh = module.root("inner_body"), named["tanh"]
    assert root.name == "next" and root.operands == (named["i.1"], tanh)
    assert [shape.sizes for shape in root.shapes] == [(), (2, 3)]
    assert (tanh.opcode, tanh.operands) == ("tanh", (named["x"],))  # no text of the metadata
    assert [shape.dtype for shape in named["begun"].shapes] == ["f32", "f32", "u32"]
    assert named["begun"].attribute("calls") == "wrapped" and named["five"].argument == "5"


def test_how_often_what_is_executed(module):
    assert times_of(module, "tanh") == [15]  # 3 rounds of 5
    # of the asynchronous call, once, and of both branches
    assert times_of(module, "sine") == [1] * 3


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        (("", ""), 5),
        (("constant(5)", "constant(9)"), 7),  # below both
        (("constant(5)", "parameter(1)"), 4),  # handed in by the caller
        (("direction=LT", "direction=NE"), 7),  # what is no limit does not count
        (('"known_induction_variable"', '"unknown"'), None),
        (("constant(0)", "constant(1)"), None),  # it starts elsewhere
        (("constant(5)", "add(%p, %p)"), 7),  # one of the limits is no constant: at most the other
    ],
)
def test_rounds_of_a_loop_from_its_condition(change, rounds):
    module = read_module(PROGRAM.replace(*change))
    assert trip_count(module, module.root("outer_body")) == rounds
    assert times_of(module, "tanh") == [rounds and 3 * rounds]


@pytest.mark.parametrize(
    ("text", "num_bytes", "is_dynamic"),
    [
        ("f32[2,3]{1,0}", 24, False),
        ("bf16[7]", 14, False),
        ("s4[3]", 2, False),
        ("f8e4m3fn[10]", 10, False),
        ("pred[]", 1, False),
        ("f32[<=5,3]", 60, True),
        ("f32[?,3]", 12, True),
    ],
)
def test_bytes_of_a_shape(text, num_bytes, is_dynamic):
    module = read_module(f"ENTRY main {{\n  x = {text} parameter(0)\n}}")
    (shape,) = module.root("main").shapes
    assert (shape.num_bytes, shape.is_dynamic) == (num_bytes, is_dynamic)
    assert math.prod(shape.sizes) > 0


def test_a_text_that_is_no_program():
    with pytest.raises(ValueError, match="marked ENTRY"):
        read_module("HloModule empty")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("channel_id=1, replica_groups={{0,1,4},{2,3,5}}, to_apply=%add", 3),
        ("replica_groups={{0}, {1}}", 1),
        ("replica_groups={}, to_apply=%add", 8),
        ("channel_id=1, to_apply=%add", 8),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", 4),
        ("replica_groups=[1,8]<=[8]", 8),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", 2),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%a", 4),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", 2),
        ("replica_groups=mesh['x'=2,'y'=1,'z'=4] {'x','z'}", 8),
        ("replica_groups=mesh[axis_0=2,axis_1=4] {axis_1,axis_0}", 8),
        # of an axis of 16 the 4 that follow a first 2
        ("replica_groups=mesh['x'=16] {'x':(2)4}", 4),
        ("replica_groups=mesh['x'=16,'y'=3] {'x':(1)2,'x':(4)4,'y'}", 24),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=(0,2,1,3) {'y'}", 4),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", 4),
        ("source_target_pairs={{0,2},{2,0},{1,3}}", 2),
    ],
)
def test_every_form_of_groups(text, size):
    assert read_group_size(f", {text}", 8) == size


def test_a_form_of_groups_that_is_unknown_is_an_error():
    with pytest.raises(ValueError, match=r"must have a known form. Received: \?"):
        read_group_size("replica_groups=?1,2?", 8)


COLLECTIVES = """
HloModule step, replica_count=2, num_partitions=4

%gather (p: f32[4,8]) -> f32[8,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %inside = f32[8,8]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
}

%body (t: (s32[], bf16[10])) -> (s32[], bf16[10]) {
  %t = (s32[], bf16[10]{0}) parameter(0)
  %v = bf16[10]{0} get-tuple-element(%t), index=1
  %passed = bf16[10]{0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[], bf16[10]{0}) tuple(%n, %passed)
}

ENTRY %main (a: f32[4,8], b: f32[16]) -> f32[16] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %sum = (f32[4,8]{1,0}, f32[16]{0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
  %begun = f32[16]{0} all-reduce-start(%b), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %done = f32[16]{0} all-reduce-done(%begun)
  %asked = ((f32[4,8]{1,0}), f32[8,8]{1,0}) async-start(%a), calls=%gather
  %got = f32[8,8]{1,0} async-done(%asked)
  %w = (s32[], bf16[10]{0}) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %scattered = f32[2]{0} reduce-scatter(%b), replica_groups={}, dimensions={0}, to_apply=%add
}
"""


def test_kinds_bytes_and_executions_of_collectives():
    for text, times in ((COLLECTIVES, 6), (COLLECTIVES.replace("known_trip_count", "unknown"), None)):
        module = read_module(text)
        assert module.num_devices == 8
        found = [
            (one.kind, one.operand_bytes, one.group_size, one.times, one.num_bytes)
            for one in find_collectives(module)
        ]
        assert found == [
            ("all-reduce", 4 * 8 * 4 + 16 * 4, 8, 1, 192),
            ("all-reduce", 16 * 4, 2, 1, 64),
            ("all-gather", 4 * 8 * 4, 2, 1, 128),
            ("collective-permute", 10 * 2, 2, times, times and 120),
            ("reduce-scatter", 16 * 4, 8, 1, 64),
        ]


ON_FOUR_DEVICES = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from bert_packed.training.backend import make_virtual_devices
from bert_packed.training.program_text import find_collectives, read_module

make_virtual_devices(4)
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

def exchange(a):  # [4, 4] on each device
    a = jax.lax.psum(a, "y")
    a = jax.lax.ppermute(a, "x", [(0, 1), (1, 0)])
    return jax.lax.all_gather(a, "x"), jax.lax.psum_scatter(a, ("x", "y"), tiled=True)

specs = PartitionSpec("x", "y"), (PartitionSpec(None, "x", "y"), PartitionSpec("x", "y"))
shared = jax.shard_map(exchange, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
product = jax.jit(lambda a: jax.numpy.sum(a @ a.T))
for function in (jax.jit(shared), product):
    a = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, specs[0]))
    module = read_module(function.lower(a).compile().as_text())
    assert module.num_devices == len(jax.devices()) == 4
    for one in find_collectives(module):
        print(one.kind, one.operand_bytes, one.group_size, one.times)
"""


@pytest.mark.slow
@pytest.mark.both_backends
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="needs KERAS_BACKEND=jax")
def test_what_is_asked_of_jax_is_what_is_found():
    command = [sys.executable, "-c", ON_FOUR_DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    asked, product = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    assert sorted(asked) == [
        "all-gather 64 2 1",
        "all-reduce 64 2 1",
        "collective-permute 64 2 1",
        "reduce-scatter 64 4 1",
    ]
    # the sum over the whole mesh ends it, however the compiler gets there
    assert product and product[-1].startswith("all-reduce 4 ")


# As the compiler for TPUs prints a loop: no count, copies, the counter compared and raised
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
        (("%limit = s32[] constant(6)", "%limit = s32[] parameter(1)"), None),
        (("%one = s32[] constant(1)", "%one = s32[] constant(2)"), None),
        (("%zero = s32[] constant(0)", "%zero = s32[] constant(3)"), None),
        (("%next = s32[] add(%copy, %one)", "%next = s32[] subtract(%copy, %one)"), None),
        (("%i = s32[] get-tuple-element(%s), index=0", "%i = s32[] get-tuple-element(%s), index=1"), None),
        (("direction=LT", "direction=NE"), None),
    ],
)
def test_rounds_of_a_loop_without_their_number(change, rounds):
    module = read_module(LOOP.replace(*change))
    (loop,) = [one for one in module.instructions if one.opcode == "while"]
    assert trip_count(module, loop) == rounds
    assert loop_share(module) == (rounds and (100 + 6 * 50) / 150)


def test_share_of_loops_without_cycles():
    assert loop_share(read_module(LOOP.replace("estimated_cycles", "other"))) is None
    assert loop_share(read_module("ENTRY main {\n  a = f32[] parameter(0)\n}")) == 1.0
