"""Launches, bytes and products of a compiled training step by part of the model, and a bound of its time.

KERAS_BACKEND=jax python -m benchmarks.roofline --devices=h100:1 --json=roofline.json
"""

import collections
import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.runner import Settings, parse_names, show
from benchmarks.synthetic_data import VOCAB_SIZE, sums_of_a_row, wikipedia_corpus
from benchmarks.training_steps import first_head, objective_kind
from bert_packed.architectures.registry import MODEL_SIZES
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.core.storage import read_json
from bert_packed.parallel.targets import ACCELERATORS, accelerator_of
from bert_packed.records import tfrecords
from bert_packed.records.example_bytes import serialize_examples
from bert_packed.schema import CAUSAL_LM
from bert_packed.training.program_text import estimated_cycles, executions, read_module
from bert_packed.training.step_report import KERNELS, LIBRARY_PRODUCTS, product_flops

DEPTH = 3  # sequences in a pack, as in the papers
NUM_RECORDS = 8  # only their shapes count
GIBIBYTE, GIGA, TERA = 2**30, 1e9, 1e12
SMALL_BYTES = 1e6  # a launch that moves less takes as long as any
ATTENTIONS = ("auto", "dense")
COMMAND = Path(__file__).resolve().parent.parent / "run_pretraining.py"
# Bytes of memory and products in bfloat16, a second. An A100's program is one for an H100. Sources: NVIDIA's
# data sheets of H100 SXM and A100 SXM with 80 GB; Google Cloud's pages of v5e, v5p and v6e
BANDWIDTHS = {"h100": 3.35e12, "a100": 2.039e12, "v5e": 819e9, "v5p": 2.765e12, "v6e": 1.64e12}
PEAKS = {"a100": 312e12, **{name: one.peak_flops for name, one in ACCELERATORS.items()}}
# Instructions that start nothing on the device: values, and ends of what was started before
NO_LAUNCH = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|while|call|conditional|after-all|partition-id|.*-done"
)
SLICES = ("dynamic-slice", "slice", "gather")
FUSION, PRODUCT, KERNEL = "fusion", "product", "kernel"


@dataclasses.dataclass(frozen=True)
class RooflineConfig(Settings):
    """Compiles the step of run_pretraining.py (--compile_for) for each model, attention and device; extra
    `aot`. Or reads steps that were compiled before. Packs have Wikipedia's lengths at depth 3. Memory is
    the compiler's plan. `ms estimated` and cycles are its estimate, no measurement, and missing for GPUs.
    A step of bert-base takes a minute or two to compile.

    The bound adds, over all launches, the longer of the times by bytes and by products, and for GPUs a
    time for each launch. Bytes are those of operands and results in the device's memory; caches are not
    counted. A Pallas kernel has the products that it declares. A TPU copies while it computes, so that its
    bound may be longer than the estimate.
    """

    programs: str = setting("", "folders of --compile_only, with commas, to read; empty = compile")
    models: str = setting(
        "bert-base",
        "sizes of models, with commas",
        parse=lambda text: parse_names(text, MODEL_SIZES),
    )
    attentions: str = setting(
        "auto,dense", "of the steps, with commas", parse=lambda text: parse_names(text, ATTENTIONS)
    )
    devices: str = setting("v5e:1,v6e:1,h100:1", "KIND:SHAPE of --compile_for, with commas, of one device")
    batch_size: int = setting(32, "packs a step, all at once", minimum=1)
    max_seq_length: int = setting(512, "tokens of a pack", minimum=16)
    peaks_of: str = setting(
        "", "device whose peaks count; empty = the one compiled for", choices=("", *PEAKS)
    )
    bandwidth_share: float = setting(0.84, "share of the peak of memory that kernels reach", minimum=0.01)
    product_share: float = setting(0.66, "share of the peak of products that kernels reach", minimum=0.01)
    launch_us: float = setting(4.0, "microseconds of a launch on a GPU, besides its work", minimum=0)


@dataclasses.dataclass(frozen=True)
class Launch:
    """An operation that the device starts, with the sums over its executions in a step."""

    part: tuple[str, str]  # forward, backward or neither, and part of the model
    kind: str  # FUSION, PRODUCT, KERNEL, or XLA's opcode
    times: int
    num_bytes: int
    flops: int
    cycles: int  # by the compiler for TPUs; 0 for others

    @property
    def is_small(self):
        return self.num_bytes < SMALL_BYTES * self.times


def main(config):
    """Compile or read, print and write."""
    rows, parts = [], []
    for step, num_tokens, report, text in found_steps(config):
        launches = find_launches(read_module(text))
        rate = functools.partial(times_of, config, device_of(config, report))
        rows.append(
            {**step, **memory_columns(report, num_tokens), **launch_columns(launches), **rate(launches)}
        )
        groups = collections.defaultdict(list)
        for launch in launches:
            groups[*launch.part, launch.kind].append(launch)
        parts += sorted(
            (
                {**step, **dict(zip(("pass", "part", "kind"), names, strict=True))}
                | {**launch_columns(group), **rate(group)}
                for names, group in groups.items()
            ),
            key=lambda row: -row["ms, bound"],
        )
    show(
        "roofline",
        config,
        {"steps": rows, "parts": parts},
        how="Counted in programs of the devices' compilers",
    )


def found_steps(config):
    """Yield (columns that name a step, its real tokens or None, its report, the text of its program)."""
    if config.programs:
        for folder in map(Path, config.programs.split(",")):
            if not (folder / "step.hlo.txt").exists():
                raise InputError(
                    f"`programs` must be folders of --compile_only of one program. Received: {folder}."
                )
            yield {"step": folder.name}, None, *read_step(folder)
        return
    corpus = wikipedia_corpus(config.max_seq_length, DEPTH)
    num_tokens = config.batch_size * sums_of_a_row(corpus, is_packed=True)["num_tokens"]
    with tempfile.TemporaryDirectory(prefix="roofline_") as folder:
        records = os.path.join(folder, "packs.tfrecord")
        for model in config.models.split(","):
            write_packs(records, corpus, MODEL_SIZES[model])
            for attention in config.attentions.split(","):
                for device in config.devices.split(","):
                    report, text = compiled(config, folder, records, model, attention, device)
                    names = {"model": model, "attention": attention, "device": device}
                    yield names, num_tokens, report, text


def write_packs(path, corpus, model_config):
    """Write a few packs, of the shape of all."""
    from bert_packed.objectives.features import NEXT_TOKENS, RECORDED

    head = first_head(model_config)
    batch = corpus.packed_batch(NUM_RECORDS, VOCAB_SIZE, np.random.default_rng(0), head)
    features = NEXT_TOKENS if head == CAUSAL_LM else RECORDED
    arrays = {one.record_name: batch[one.name] for one in features}
    tfrecords.write_records(path, serialize_examples(arrays))


def compiled(config, folder, records, model, attention, device):
    """Report and program of a step that a command compiles; raises `InputError` where it cannot."""
    target = Path(folder, "compiled")
    flags = {
        "input_file": records,
        "objective": objective_kind(MODEL_SIZES[model]),
        "bert_config_file": model,
        "attention": attention,
        "train_batch_size": config.batch_size,
        "micro_batch_size": config.batch_size,
        "compile_only": target,
        "compile_for": device,
    }
    # Each device has a process, since a compiler is set up once
    command = [sys.executable, str(COMMAND), *(f"--{name}={value}" for name, value in flags.items())]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise InputError(f"{model} for {device}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return read_step(target)


def read_step(folder):
    return read_json(folder / "step.json"), (folder / "step.hlo.txt").read_text()


def device_of(config, report):
    """The key in `PEAKS` whose peaks count for a step; raises `InputError` where there is none."""
    if config.peaks_of:
        return config.peaks_of
    known = accelerator_of(report.get("device_kind"))
    if known is None:
        raise InputError(
            "`peaks_of` must name a device for a program of --compile_only without --compile_for."
        )
    return next(name for name, one in ACCELERATORS.items() if one is known)


def memory_columns(report, num_tokens):
    seconds = report["estimated_seconds"]
    return {
        "packs": report.get("train_batch_size"),
        "memory, GiB": report["peak_bytes"] / GIBIBYTE,
        "of, GiB": report.get("device_memory_bytes", 0) / GIBIBYTE or None,
        "ms estimated": seconds and 1e3 * seconds,
        "real tokens/s, estimated": seconds and num_tokens and num_tokens / seconds,
    }


def launch_columns(launches):
    """Counts of some launches: columns of a table."""
    in_fusions = [one for one in launches if one.kind == FUSION]
    return {
        "launches": sum(one.times for one in launches),
        "below 1 MB": sum(one.times for one in launches if one.is_small),
        "GB": sum(one.num_bytes for one in launches) / GIGA,
        "GB in fusions": sum(one.num_bytes for one in in_fusions) / GIGA,
        "TFLOP": sum(one.flops for one in launches) / TERA,
        "million cycles": sum(one.cycles for one in launches) / 1e6 or None,
    }


def times_of(config, device, launches):
    """Milliseconds that launches need at least on a device: columns of a table."""
    bandwidth = BANDWIDTHS[device] * config.bandwidth_share / 1e3
    rate = PEAKS[device] * config.product_share / 1e3
    is_gpu = device not in ACCELERATORS or ACCELERATORS[device].platform == "gpu"
    started = sum(one.times for one in launches) * config.launch_us / 1e3 if is_gpu else 0.0
    longer = sum(max(one.num_bytes / bandwidth, one.flops / rate) for one in launches)
    return {
        "ms by bytes": sum(one.num_bytes for one in launches) / bandwidth,
        "ms by products": sum(one.flops for one in launches) / rate,
        "ms, bound": longer + started,
    }


def find_launches(module):
    """What a device starts in a run of a program, loops with all rounds: list of `Launch`.

    Raises:
        InputError: a loop has an unknown length.
    """
    controls = ("while", "call", "conditional")
    inside = {name for one in module.instructions if one.opcode not in controls for name in one.called}
    launches = []
    for one, times in executions(module):
        if one.computation in inside or NO_LAUNCH.fullmatch(one.opcode):
            continue
        if times is None:
            raise InputError(f"a loop must have a known length. Received: {one.line.strip()[:80]}.")
        flops, moved, cycles = flops_of(module, one), moved_bytes(module, one), estimated_cycles(one) or 0
        part, kind = part_of(one.attribute("op_name")), kind_of(one, flops)
        launches.append(Launch(part, kind, times, times * moved, times * flops, times * cycles))
    return launches


def part_of(op_name):
    """Direction and part of the model, without numbers of blocks, from a name of an operation.

    jit(step)/transpose(jvp(bert))/layer_1/attention/query/dot_general  ->  ("backward", "attention/query")
    """
    is_backward = "transpose(" in op_name or "gradient_tape" in op_name
    direction = "backward" if is_backward else "forward" if "jvp(" in op_name else ""
    names = re.sub(r"\bjit\([^)]*\)|\w+\(|\)|layer_\d+/|(?<=dropout)_\d+", "", op_name).split("/")[:-1]
    return direction, "/".join(filter(None, names))


def kind_of(one, flops):
    if KERNELS.search(one.attribute("custom_call_target")):
        return KERNEL
    return PRODUCT if flops else one.opcode


def flops_of(module, one):
    """Operations of the products of one execution; 0 for a library's that are not told."""
    inner = (other for name in one.called for other in module.computations.get(name, ()))
    return (product_flops(one) or 0) + sum(flops_of(module, other) for other in inner)


def moved_bytes(module, one):
    """Bytes that one execution reads from the device's memory and writes to it."""
    if one.opcode == "slice-start":  # to a TPU's vector memory: operand, result, flags
        return one.shapes[1].num_bytes
    written = one.shapes
    if LIBRARY_PRODUCTS.search(one.attribute("custom_call_target")):
        written = written[:1]  # the next is a workspace
    elif one.opcode.endswith("-start"):  # its result holds its operands
        written = one.shapes[len(one.operands) :][:1] if one.opcode == "async-start" else one.shapes[:1]
    if one.opcode != FUSION:
        users = {number: [one] for number in range(len(one.operands))}
        root = one
    else:
        inner = module.computations[one.called[0]]
        root = module.root(one.called[0])
        users = {
            int(own.argument): [other for other in inner if own in other.operands]
            for own in inner
            if own.opcode == "parameter"
        }
    if root.opcode == "dynamic-update-slice":  # in place
        written = root.operands[1].shapes
    reads = (bytes_read(operand, users.get(number, ())) for number, operand in enumerate(one.operands))
    return size_of(written) + sum(reads)


def bytes_read(operand, users):
    """Bytes of an operand that its users read: parts, where all take slices."""
    whole = size_of(operand.shapes)
    if users and all(one.opcode in (*SLICES, "dynamic-update-slice") for one in users):
        sliced = [one.shapes for one in users if one.opcode in SLICES]
        return min(whole, sum(map(size_of, sliced)))
    return whole


def size_of(shapes):
    return sum(shape.num_bytes for shape in shapes if not shape.is_on_chip)


if __name__ == "__main__":
    sys.exit(run(main, RooflineConfig))
