"""A compiled step as a `StepProgram`, from what each backend tells of it."""

import time

from bert_packed.training.step_report import StepProgram


def jax_program(lowered):
    """Compile a traced step of JAX.

    Args:
        lowered: What `jax.jit(step).lower(...)` gives.
    """
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    counts, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    sizes = {}
    if memory is not None:  # not every plug-in tells
        sizes = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    return StepProgram(
        compiled.as_text(),
        seconds,
        flops=counts.get("flops"),
        bytes_accessed=counts.get("bytes accessed"),
        **sizes,
    )


def tensorflow_program(function, *arguments):
    """Compile a step of TensorFlow, twice: its text and its memory come from two calls.

    XLA's counts of operations and of bytes stay unknown; TensorFlow has no call for them.

    Args:
        function: `tf.function(..., jit_compile=True)`.
        arguments: To call it with; nothing is computed.
    """
    compiler_ir = function.experimental_get_compiler_ir(*arguments)
    start = time.perf_counter()
    text = compiler_ir(stage="optimized_hlo")
    seconds = time.perf_counter() - start
    return StepProgram(text, seconds, **_buffer_sizes(compiler_ir(stage="optimized_hlo_proto_serialized")))


def _buffer_sizes(serialized):
    """Sizes of a `StepProgram` from a serialized `xla.HloProto`; {} where this TensorFlow cannot read one."""
    try:
        from tensorflow.compiler.xla.service import hlo_pb2
    except ImportError:
        return {}
    buffers = hlo_pb2.HloProto.FromString(serialized).buffer_assignment.buffer_allocations
    arguments = [buffer for buffer in buffers if buffer.is_entry_computation_parameter]
    outputs = [buffer for buffer in buffers if buffer.maybe_live_out]
    temporary = [
        buffer
        for buffer in buffers
        if not (
            buffer.is_entry_computation_parameter
            or buffer.maybe_live_out
            or buffer.is_constant
            or buffer.is_thread_local
        )
    ]
    return {
        "argument_bytes": sum(buffer.size for buffer in arguments),
        "output_bytes": sum(buffer.size for buffer in outputs),
        "aliased_bytes": sum(buffer.size for buffer in outputs if buffer.is_entry_computation_parameter),
        "temporary_bytes": sum(buffer.size for buffer in temporary),
    }
