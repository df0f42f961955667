"""Programs as XLA prints them: shapes, what calls what, how often loops run."""

# ruff: noqa: E501  a line of XLA stays one

import math

import pytest

from bert_packed.training.hlo import executions, read_module, trip_count

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
  ROOT %less = pred[] fusion(%i), kind=kLoop, calls=%below_five
}

%inner_body (t.1: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %t.1 = (s32[], f32[2,3]{1,0}) parameter(0)
  %x = f32[2,3]{1,0:T(8,128)S(1)} get-tuple-element(%t.1), index=1
  %tanh = f32[2,3]{1,0} tanh(f32[2,3]{1,0} %x), metadata={op_name="a) = while(b, calls=%wrapped"}
  ROOT %next = (s32[], /*index=1*/f32[2,3]{1,0}) tuple(%i.1, /*index=1*/%tanh)
}

%outer_body (u: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %u = (s32[], f32[2,3]{1,0}) parameter(0)
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
    return [(one.times, one.is_exact) for one in executions(module) if one.instruction.opcode == opcode]


def test_what_a_line_says(module):
    assert module.entry == "main" and module.num_devices == 4
    assert list(module.computations) == [
        *("wrapped", "below_five", "inner_condition", "inner_body"),
        *("outer_body", "outer_condition", "main"),
    ]
    body = module.computations["inner_body"]
    assert body.root.name == "next" and body.root.operands == ("i.1", "tanh")
    assert [shape.sizes for shape in body.root.shapes] == [(), (2, 3)]
    tanh = body.instructions["tanh"]
    assert (tanh.opcode, tanh.operands) == ("tanh", ("x",))  # behind its shape, and no text of the metadata
    begun = module.computations["main"].instructions["begun"]
    assert [shape.dtype for shape in begun.shapes] == ["f32", "f32", "u32"]
    assert begun.attribute("calls") == "wrapped"


def test_how_often_what_is_executed(module):
    assert times_of(module, "tanh") == [(15, True)]  # 3 rounds of 5
    # of the asynchronous call, once, and of both branches
    assert times_of(module, "sine") == [(1, True)] * 3


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        (("", ""), 5),
        (("constant(5)", "constant(9)"), 7),  # below both
        (("direction=LT", "direction=NE"), 7),  # what is no limit does not count
        (('"known_induction_variable"', '"unknown"'), None),
        (("constant(0)", "constant(1)"), None),  # it starts elsewhere
        (("constant(5)", "add(%p, %p)"), 7),  # one of the limits is no constant: at most the other
    ],
)
def test_rounds_of_a_loop_from_its_condition(change, rounds):
    module = read_module(PROGRAM.replace(*change))
    outer = module.computations["outer_body"]
    assert trip_count(module, outer, outer.instructions["inner"]) == rounds
    want = (15, True) if rounds == 5 else (3 * (rounds or 1), rounds is not None)
    assert times_of(module, "tanh") == [want]


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
    (shape,) = module.computations["main"].instructions["x"].shapes
    assert (shape.num_bytes, shape.is_dynamic) == (num_bytes, is_dynamic)
    assert math.prod(shape.sizes) > 0


def test_a_text_that_is_no_program():
    with pytest.raises(ValueError, match="marked ENTRY"):
        read_module("HloModule empty")
