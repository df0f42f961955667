"""Cycles of a Mamba's block on a TPU that is not here, by its compiler.

KERAS_BACKEND=jax python -m benchmarks.block_cycles --json=block_cycles.json
"""

import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.results import Settings, parse_names, show
from bert_packed.architectures.mamba.config import StateSpaceConfig
from bert_packed.architectures.registry import CAUSAL_LM, MIXED, load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.training.engines import choose_backend
from bert_packed.training.program_text import estimated_cycles, executions, read_module

DEVICE, HERTZ = "v5e:1", 1.5e9
VOCAB_SIZE = 128  # the block has none
KERNEL = "tpu_custom_call"
MILLI, MEBIBYTE = 1e3, 2**20


def check_numbers(text):
    """The text, of whole numbers above 0 with commas; else raises `ValueError`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError("whole numbers above 0, separated by commas")
    return text


@dataclasses.dataclass(frozen=True)
class BlockCyclesConfig(Settings):
    """Compiles one block of a Mamba or Mamba-2, forward and backward, in bfloat16 for a TPU v5e (extra
    `aot`), with the kernels that a run takes there and with --attention=dense. Nothing runs on a TPU.

    products   matrix products outside of loops and kernels, with what XLA fused into them, but for those that
               it names after what follows
    the rest   all else outside of them
    loops      the loops of the scan, with all rounds
    kernels    Pallas kernels, of which the compiler has no estimate: instructions of the compiled kernel, one a
               cycle, as if it never waited for memory

    All but kernels are the compiler's own cycles, at 1.5 GHz. Instructions are counted in what libtpu
    writes out for debugging, in a form that it does not promise.
    """

    bert_config_file: str = setting("mamba2-130m", "size, or config.json, of the Mamba or Mamba-2")
    widths: str = setting("768,2048", "of the model, with commas", parse=check_numbers)
    packs: str = setting("1,8", "packs of a step, with commas", parse=check_numbers)
    max_seq_length: int = setting(4096, "tokens of a pack", minimum=16)
    attentions: str = setting(
        "auto,dense", "of the blocks, with commas", parse=lambda text: parse_names(text, ("auto", "dense"))
    )


def main(config):
    """Compile, print and write."""
    if choose_backend() != "jax":
        raise InputError("`KERAS_BACKEND` must be jax: its compiler has the estimates.")
    model_config = load_model_config(config.bert_config_file, VOCAB_SIZE)
    if not isinstance(model_config, StateSpaceConfig):
        raise InputError(
            f"`bert_config_file` must be a Mamba or Mamba-2. Received: {config.bert_config_file}."
        )
    rows = []
    with tempfile.TemporaryDirectory(prefix="block_cycles_") as folder:
        # libtpu reads it once, as it is loaded
        flags = (
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
        )
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(flags)
        for width in map(int, config.widths.split(",")):
            one = dataclasses.replace(model_config, hidden_size=width, num_hidden_layers=1)
            for packs in map(int, config.packs.split(",")):
                for attention in config.attentions.split(","):
                    program = compile_block(one, packs, config.max_seq_length, attention)
                    settings = {"width": width, "packs": packs, "attention": attention}
                    rows.append({**settings, **block_row(program, folder)})
    show("block_cycles", config, {"blocks": rows}, ["Estimates; nothing ran on a TPU."])


def compile_block(model_config, num_packs, length, attention):
    """A block forward and backward, compiled for `DEVICE`."""
    import jax

    from bert_packed.architectures.packed_model import build_model
    from bert_packed.kernels.choose import choose_kernels
    from bert_packed.layers.context import PackContext
    from bert_packed.parallel.targets import absent_target

    jax.config.update("jax_enable_compilation_cache", False)  # what is found there is not listed
    target = absent_target(DEVICE)
    kernels = choose_kernels(attention, model_config, length, target.platform)
    (block,) = build_model(CAUSAL_LM, model_config, 0, MIXED, **kernels.options).backbone.blocks

    def of(*shape, dtype="float32"):
        sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def forward_and_backward(weights, hidden_BSD, position_ids_BS, gradient_BSD):
        def forward(weights, hidden_BSD):
            (outputs_BSD, _), _ = block.stateless_call(
                weights, [], hidden_BSD, context=PackContext(None, position_ids_BS)
            )
            return outputs_BSD

        return jax.vjp(forward, weights, hidden_BSD)[1](gradient_BSD)

    hidden_BSD = of(num_packs, length, model_config.hidden_size)
    weights = [of(*one.shape, dtype=one.dtype) for one in block.trainable_variables]
    arguments = weights, hidden_BSD, of(num_packs, length, dtype="int32"), hidden_BSD
    with jax.default_device(target.devices[0]):
        return jax.jit(forward_and_backward).lower(*arguments).compile(target.compiler_options)


def block_row(program, folder):
    """Times of a compiled block by `DESCRIPTION`, in ms, and its temporaries."""
    module = read_module(program.as_text())
    cycles = dict.fromkeys(("products", "the rest", "loops", "kernels"), 0)
    for instruction, times in executions(module):
        if KERNEL in instruction.attributes:
            cycles["kernels"] += times * kernel_cycles(newest_listing(folder, instruction.name))
        elif found := estimated_cycles(instruction):
            is_product = "dot_general" in (instruction.attribute("op_name") or "")
            group = "loops" if times > 1 else "products" if is_product else "the rest"
            cycles[group] += found * times
    milliseconds = {f"{group}, ms": MILLI * count / HERTZ for group, count in cycles.items()}
    return {
        **milliseconds,
        "ms": sum(milliseconds.values()),
        "temporaries, MiB": program.memory_analysis().temp_size_in_bytes / MEBIBYTE,
    }


def newest_listing(folder, name):
    """Text of the instructions of a kernel in the program that was compiled last."""
    found = [
        path for path in Path(folder).glob(f"*-{name}-*-final_bundles.txt") if "schedule" not in path.name
    ]
    if not found:
        raise InputError(f"libtpu must list the instructions of each kernel. Received: none of {name}.")
    return max(found, key=lambda path: path.stat().st_mtime_ns).read_text()


def kernel_cycles(text):
    """Instructions that a kernel executes, those of loops as often as they go round.

    0x1     :  { a }                                                       1
    0x2 LB: > { %i = sadd.s32 2, %j }                                      4
    0x3     : >> { b }                                                     4, or more in another loop
    0x4     : > { %p = scmp.ge.s32.totalorder %i, 8 /* loop exit test */ } 4
    """
    lines = []
    for line in text.splitlines():
        if found := re.match(r"\s*(?:0x[0-9a-f]+|0)\s+(?:\w\w)?\s*:\s*(>*)\s*\{(\})?", line):
            marks, is_empty = found.groups()
            # An empty one has no mark
            lines.append((lines[-1][0] if is_empty and lines else len(marks), line))
    return _cycles_of(lines, 0)


def _cycles_of(lines, depth):
    """Cycles of lines, (depth of loops, text), that are all at least as deep as `depth`."""
    total, place = 0, 0
    while place < len(lines):
        if lines[place][0] == depth:
            total, place = total + 1, place + 1
            continue
        end = place
        while end < len(lines) and lines[end][0] > depth:
            end += 1
        inside = lines[place:end]
        body = "\n".join(line for level, line in inside if level == depth + 1)
        # The last instructions of a loop's body may come after one without a mark
        rounds = _rounds(body) if "loop exit test" in body or "LB:" in inside[0][1] else 1
        total, place = total + rounds * _cycles_of(inside, depth + 1), end
    return total


def _rounds(body):
    """How often a loop goes round: until its counter, which rises by a constant step, is at a constant."""
    tests = re.findall(r"(\S+), (\S+) /\* loop exit test", body)
    if len(tests) == 1 and tests[0][1].isdigit():
        counter, end = tests[0]
        if step := re.search(rf"{counter} = sadd\.s32 (\d+),", body):
            return -(-int(end) // int(step[1]))
    raise ValueError("a loop must end after a constant number of rounds")


if __name__ == "__main__":
    sys.exit(run(main, BlockCyclesConfig))
