"""Report of a compiled step: the contract, planted breaches of it, counts by hand and of a real step."""

# ruff: noqa: E501  a line of XLA stays one

import keras
import numpy as np
import pytest
from packs import packed_and_unpacked
from tiny import CONFIG, make_engine

from bert_packed.parallel.targets import memory_in
from bert_packed.training.optimization import Lamb
from bert_packed.training.step_report import (
    StepProgram,
    compiled_program,
    describe_step,
    is_static,
    search_largest,
)

PLAIN = """
HloModule step

%body (t: (s32[], f32[4,6])) -> (s32[], f32[4,6]) {
  %t = (s32[], f32[4,6]{1,0}) parameter(0)
  %x = f32[4,6]{1,0} get-tuple-element(%t), index=1
  %w = f32[5,6]{1,0} constant({...})
  %many = f32[3,4,6]{2,1,0} broadcast(%x), dimensions={1,2}
  %wide = f32[3,5,6]{2,1,0} broadcast(%w), dimensions={1,2}
  %batched = f32[3,4,5]{2,1,0} dot(%many, %wide), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}
  %place = s32[] get-tuple-element(%t), index=0
  %cut = f32[1,6]{1,0} dynamic-slice(%x, %place, %place), dynamic_slice_sizes={1,6}
  ROOT %r = (s32[], f32[4,6]{1,0}) tuple(%place, %x)
}

ENTRY %main (a: f32[4,6], b: f32[6,5]) -> f32[4,5] {
  %a = f32[4,6]{1,0} parameter(0)
  %b = f32[6,5]{1,0} parameter(1)
  %loop = (s32[], f32[4,6]{1,0}) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  PLANTED
  ROOT %product = f32[4,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
ONE = 2 * 4 * 5 * 6
FLOPS = 7 * 3 * ONE + ONE
UNKNOWN_COST = ("ConcatBitcast", "X64SplitLow", "ZeroCrop", "AllocateBuffer")
UNKNOWN_LENGTH = {"known_trip_count": "unknown"}
CUBLAS = (
    '%g = (f32[4,5]{1,0}, s8[900]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)


def report_of(planted="", **changes):
    return describe_step(StepProgram(PLAIN.replace("PLANTED", planted), 1.5, **changes))


def test_a_static_program():
    report = report_of()
    assert is_static(report)
    assert (report["programs"], report["devices"], report["compile_seconds"]) == (1, 1, 1.5)
    assert report["dynamic_dimensions"] == report["host_callbacks"] == report["loops_of_unknown_length"] == 0
    assert report["matmul_flops"] == FLOPS
    # what a backend does not tell stays unknown
    assert {report[name] for name in ("flops", "bytes_accessed", "peak_bytes", "temporary_bytes")} == {None}
    report = describe_step(StepProgram(PLAIN, 1.0, 2, 10.0, 20.0, 100, 60, 40, 30))
    names = ("devices", "flops", "bytes_accessed", "peak_bytes")
    assert [report[name] for name in names] == [2, 10.0, 20.0, 100 + 60 - 40 + 30]


def test_seconds_are_without_the_calls_of_unknown_cost():
    """A loop has those of all its rounds."""
    calls = [
        f'%{i} = f32[4]{{0}} custom-call(%a), custom_call_target="{of}"' for i, of in enumerate(UNKNOWN_COST)
    ]
    text = PLAIN.replace("PLANTED", "\n  ".join(calls))
    for operands, cycles in (("%many, %wide", 100), ("%a, %b", 300)):
        config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
        text = text.replace(f"dot({operands}), ", f"dot({operands}), {config}, ")
    program = compiled_program(text, 1.0, {"optimal_seconds": 0.5 - 3, "flops": 5.0}, None)
    assert program.estimated_seconds == pytest.approx(0.5) and program.flops == 5.0
    assert describe_step(program)["estimated_seconds"] == pytest.approx(0.5 * (7 * 100 + 300) / 400)
    unknown = compiled_program(text.replace("known_trip_count", "other"), 1.0, {"optimal_seconds": 1.0}, None)
    assert describe_step(unknown)["estimated_seconds"] is None
    for counts in ({"optimal_seconds": -3.5}, {}):
        assert compiled_program(text, 1.0, counts, None).estimated_seconds is None


def test_what_a_refused_program_needs():
    reasons = {
        "RESOURCE_EXHAUSTED: Ran out of memory. Used 17.2G of 15.75G hbm. Exceeded by": ("17.2G", "15.75G"),
        "RESOURCE_EXHAUSTED: memory required for HLO temporaries (76.30G) exceeds available HBM (15G).": (
            "76.30G",
            "15G",
        ),
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 1.2M of 1.0M vmem": None,
        "INTERNAL: Used 3G of 2G hbm": None,
    }
    assert {reason: memory_in(reason) for reason in reasons} == reasons


@pytest.mark.parametrize(
    ("changes", "flops"),
    [
        (UNKNOWN_LENGTH, None),
        ({**UNKNOWN_LENGTH, " dot(%many": " add(%many"}, ONE),  # a loop without products hides none
        ({" dot(%many": " add(%many"}, ONE),
        ({"PLANTED": CUBLAS}, FLOPS + ONE),
        # sizes that are not written down, or a library's form, give no guess
        ({"PLANTED": CUBLAS.replace("lhs_contracting", "other")}, None),
        ({"PLANTED": '%g = f32[4,5]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"'}, None),
    ],
)
def test_operations_of_the_products(changes, flops):
    text = PLAIN
    for old, new in changes.items():
        text = text.replace(old, new)
    assert describe_step(StepProgram(text, 1.0))["matmul_flops"] == flops


DYNAMIC = (
    "%d = f32[<=4,6]{1,0} negate(%a)",
    "%d = f32[4,6]{1,0} set-dimension-size(%a, %n), dimensions={0}",
    '%d = (f32[4,6]{1,0}, s32[]) custom-call(%a), custom_call_target="PadToStatic"',
    "%d = f32[4,6]{1,0} dynamic-reshape(%a, %n, %n)",
)
CALLBACKS = (
    '%h = f32[4]{0} custom-call(%a), custom_call_target="xla_ffi_python_cpu_callback"',
    "%h = ((f32[4]{0}), token[]) infeed(%t), infeed_config=...",
    "%h = token[] outfeed(%a, %t), outfeed_shape=f32[4,6]{1,0}",
    "%h = (f32[4,6]{1,0}, u32[], token[]) send(%a, %t), channel_id=1, is_host_transfer=true",
)


@pytest.mark.parametrize("line", [*DYNAMIC, *CALLBACKS])
def test_dynamic_shapes_and_host_callbacks_are_found(line):
    """Also inside a loop, where it does more harm."""
    inside = PLAIN.replace("PLANTED", "").replace("  %w = ", f"  {line}\n  %w = ")
    for report in (report_of(line), describe_step(StepProgram(inside, 1.0))):
        assert not is_static(report) and report["broken_by"] == [line[:160]]
        counts = report["dynamic_dimensions"], report["host_callbacks"]
        assert counts == ((1, 0) if line in DYNAMIC else (0, 1))


def test_static_programs_are_recognised():
    """A send to another device, a kernel of XLA, and names in annotations."""
    lines = (
        "%o = (f32[4,6]{1,0}, u32[], token[]) send(%a, %t), channel_id=1",
        '%p = f32[4,6]{1,0} custom-call(%a), custom_call_target="TopK"',
        '%q = f32[4,6]{1,0} negate(%a), metadata={op_name="user_callback/infeed f32[<=3]"}',
    )
    report = report_of("\n  ".join(lines))
    assert is_static(report) and report["kernels"] == 0
    call = '%k = f32[4]{0} custom-call(%a), custom_call_target="tpu_custom_call"'
    assert is_static(report_of(call)) and report_of(call)["kernels"] == 1


UNKNOWN = """
HloModule step, replica_count=2, num_partitions=1

%gather (p: f32[4,6]) -> f32[8,6] {
  %p = f32[4,6]{1,0} parameter(0)
  ROOT %inside = f32[8,6]{1,0} all-gather(%p), replica_groups={}, dimensions={0}
}

%body (t: (s32[], f32[4,6])) -> (s32[], f32[4,6]) {
  %t = (s32[], f32[4,6]{1,0}) parameter(0)
  %x = f32[4,6]{1,0} get-tuple-element(%t), index=1
  %sum = f32[4,6]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %product = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (a: f32[4,6]) -> f32[4,6] {
  %a = f32[4,6]{1,0} parameter(0)
  %w = (s32[], f32[4,6]{1,0}) while(%s), condition=%c, body=%body
  %few = f32[2]{0} slice(%a)
  %gathered = f32[4]{0} all-gather(%few), replica_groups={}
  %asked = ((f32[4,6]{1,0}), f32[8,6]{1,0}) async-start(%a), calls=%gather
  %got = f32[8,6]{1,0} async-done(%asked)
  %begun = f32[2]{0} all-reduce-start(%few), replica_groups={{0,1}}, to_apply=%add
  %done = f32[2]{0} all-reduce-done(%begun)
  %permuted = f32[4,6]{1,0} collective-permute(%a), source_target_pairs={{0,1}}
  ROOT %last = f32[4,6]{1,0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_what_a_loop_of_unknown_length_does_is_unknown():
    report = describe_step(StepProgram(UNKNOWN, 1.0))
    assert report["loops_of_unknown_length"] == 1 and is_static(report)
    assert report["matmul_flops"] is None and report["collective_bytes"] is None
    assert [tuple(row.values()) for row in report["collectives"]] == [
        ("all-reduce", 2, 3, None, None),
        ("all-gather", 2, 2, 2, 4 * 6 * 4 + 2 * 4),
        ("collective-permute", 2, 1, 1, 4 * 6 * 4),
    ]
    known = UNKNOWN.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    report = describe_step(StepProgram(known, 1.0))
    assert (report["matmul_flops"], report["loops_of_unknown_length"]) == (3 * 2 * 4 * 4 * 6, 0)
    assert [row["bytes"] for row in report["collectives"]] == [4 * 96 + 8, 96 + 8, 96]
    assert report["collective_bytes"] == 6 * 96 + 16


def test_memory_by_the_plan_of_buffers():
    from tensorflow.compiler.xla.service.hlo_pb2 import BufferAssignmentProto

    from bert_packed.training.engines.tensorflow import buffer_sizes

    plan = BufferAssignmentProto()
    for size, kinds in (
        (1, ["is_entry_computation_parameter"]),
        (20, ["is_entry_computation_parameter", "maybe_live_out"]),
        (300, ["maybe_live_out"]),
        (4_000, []),
        (50_000, ["is_constant"]),
        (600_000, ["is_thread_local"]),
        (7_000_000, []),
    ):
        plan.buffer_allocations.add(size=size, **dict.fromkeys(kinds, True))
    assert buffer_sizes(plan) == {
        "argument_bytes": 21,
        "output_bytes": 320,
        "aliased_bytes": 20,
        "temporary_bytes": 7_004_000,
    }


@pytest.mark.slow
@pytest.mark.both_backends
def test_the_contract_of_the_training_step():
    """The tiny model's step, in three micro-batches, is static; its products are counted by hand."""
    engine = make_engine(optimizer=Lamb(0.01), micro_batch_size=2)
    packed, _ = packed_and_unpacked(0)
    batch = {name: np.concatenate([values, values])[:6] for name, values in packed.items()}
    weights = [variable.numpy() for variable in engine.model.trainable_variables]
    program = engine.step_program(batch)
    for before, variable in zip(weights, engine.model.trainable_variables, strict=True):
        np.testing.assert_array_equal(before, variable.numpy())  # nothing was trained
    assert engine.num_train_traces == 1
    report = describe_step(program)
    assert is_static(report), report["broken_by"]
    assert report["loops_of_unknown_length"] == 0 and "while(" in program.text
    assert report["collectives"] == [] and report["collective_bytes"] == 0
    # Multiply-adds are counted layer by layer, forward and twice that backward
    packs, length = batch["token_ids"].shape
    predictions, slots = batch["prediction_ids"].shape[1], batch["slot_weights"].shape[1]
    width, wide = CONFIG.hidden_size, CONFIG.intermediate_size
    block = 4 * length * width**2 + 2 * length**2 * width + 2 * length * width * wide
    heads = predictions * width * (width + CONFIG.vocab_size) + slots * width * (width + 2)
    assert report["matmul_flops"] == 3 * 2 * packs * (CONFIG.num_hidden_layers * block + heads)
    # Weights, two moments of each, and the batch go in; the former come out, over what went in
    state = 3 * sum(values.nbytes for values in weights)
    data = sum(values.nbytes for values in batch.values())
    assert report["argument_bytes"] == pytest.approx(state + data, abs=200)  # the seeds and the step
    assert program.aliased_bytes >= state
    assert report["temporary_bytes"] > sum(values.nbytes for values in weights)  # the gradients at least
    assert report["peak_bytes"] >= report["argument_bytes"] + report["temporary_bytes"]
    is_jax = keras.backend.backend() == "jax"
    # XLA's count has element-wise work too, and the body of the loop once
    assert (report["flops"] is None) == (report["bytes_accessed"] is None) == (not is_jax)
    assert not is_jax or report["flops"] > report["matmul_flops"] / 3


def test_a_search_goes_on_by_sixteen_times_at_most():
    """An estimate that is far too high would compile, for minutes, what no device holds."""
    tried = []
    found = search_largest(lambda size: tried.append(size) or size <= 1000, lambda size: 10**9, 1)
    assert tried[:4] == [1, 16, 256, 4096]
    assert 1000 - 1000 // 16 <= found <= 1000
