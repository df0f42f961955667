"""`--compile_only`: compile a run's step for its real shapes, write program and report, train nothing.

With `--compile_for` the devices need not be here, and the report has a forecast: memory beside what a device
has, and the compiler's estimate of a step.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np

from bert_packed import schema
from bert_packed.core.command_line import print_table
from bert_packed.core.runtime import versions
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json, write_text
from bert_packed.parallel.replicas import count_replicas
from bert_packed.parallel.targets import GIB, TooLargeError, absent_target, devices_here, program_for
from bert_packed.runs.pretraining import Run
from bert_packed.runs.pretraining_data import read_shapes
from bert_packed.runs.run_directory import RUN_FILE
from bert_packed.training.backend import make_virtual_devices, out_of_memory_names
from bert_packed.training.step_report import describe_step, is_static, search_largest, size_that_fills

PROGRAM_FILE, REPORT_FILE = "step.hlo.txt", "step.json"
# The step breaks the static-graph contract; it is reported all the same
STATUS_NOT_STATIC = 4
UNKNOWN = "not told"
KEPT_BYTES = GIB // 4  # that libtpu keeps of a chip's memory for itself


def compile_run(config, backend):
    """Compile the step of a run, write its program and its report, and print a table.

    No output directory is read or written. Returns the exit status, 0 or `STATUS_NOT_STATIC`. Raises
    `InputError` where the records or flags cannot be used, or the folder is another run's.
    """
    folder = Path(config.compile_only)
    _check_folder(folder)
    # This comes before anything asks the backend for its devices, which fixes them
    target = absent_target(config.compile_for) if config.compile_for else None
    if target and config.mesh and math.prod(config.mesh_shape) != target.num_devices:
        raise InputError(
            f"`mesh` must have all {target.num_devices} devices of compile_for={config.compile_for}. "
            f"Received: {config.mesh}."
        )
    if config.num_virtual_devices:
        make_virtual_devices(config.num_virtual_devices)
    run = _run_of_shapes(config, target or devices_here())
    if config.largest_micro_batch:
        config, program = find_largest(run)
    else:
        program = compile_step(run)
    report = {"backend": backend, **describe_step(program)}
    if target:
        sizes = {"train_batch_size": config.train_batch_size, "micro_batch_size": config.packs_at_once}
        report = {**forecast(report, target), **sizes, **report}
    # A report for fewer devices would be read as one for all of them
    if config.num_virtual_devices not in (0, report["devices"]):
        raise InputError(
            f"`num_virtual_devices` must be as many as the step runs on, which is {report['devices']}. "
            f"Received: {config.num_virtual_devices}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(str(folder / PROGRAM_FILE), program.text)
    made_by = versions(("bert_packed", "keras", "tensorflow", "jax", "jaxlib"))
    write_json(folder / REPORT_FILE, {**report, "versions": made_by})
    _print_report(report, folder)
    return 0 if is_static(report) else STATUS_NOT_STATIC


def compile_program(config):
    """The `StepProgram` of a run's step on this process's devices."""
    return compile_step(_run_of_shapes(config, devices_here()))


def _run_of_shapes(config, target):
    """A `Run` whose records are read for their shapes alone."""
    run = Run(config, target=target, data=read_shapes(config))
    run.fit_model()
    return run


def compile_step(run):
    """The `StepProgram` of a run; raises `TooLargeError` or `MemoryError` where a step does not fit."""
    config, target, engine = run.config, run.target, run.build_engine()
    if config.layout != "none":
        print(engine.replicas.layout.describe(run.model_config))
    batch = empty_batch(engine.objective.features, run.data.train.spec, config.train_batch_size)
    if target.devices:
        return program_for(target, engine, batch, config.packs_at_once)
    with out_of_memory_names("the compilation of a step", "micro_batch_size"):
        return engine.step_program(batch)


def find_largest(run):
    """Find the largest micro-batch whose step fits the absent devices: its config and `StepProgram`.

    The config's step has the packs of `train_batch_size`, rounded up to whole micro-batches. Raises
    `TooLargeError` where not even one pack a device fits.
    """
    config, target = run.config, run.target
    unit = target.num_devices if config.layout == "none" else count_replicas(config.layout, config.mesh_shape)
    found = {}

    def fits(size):
        # A step of one micro-batch has no gradients to add up, so it may fit where one of several does not
        num_parts = -(-config.train_batch_size // (size * unit))
        tried = dataclasses.replace(
            config,
            micro_batch_size=size * unit,
            train_batch_size=num_parts * size * unit,
            # The initial batch belongs to the schedule alone, but must be whole micro-batches
            initial_batch_size=size * unit if config.initial_batch_size else 0,
        )
        try:
            found[size] = tried, compile_step(dataclasses.replace(run, config=tried))
        except TooLargeError:
            print(f"too large  {size * unit} packs at once", flush=True)
            if size == 1:
                raise
            return False
        print(f"fits       {size * unit} packs at once", flush=True)
        return True

    def in_proportion(size):
        _, program = found[size]
        return size_that_fills(target.accelerator.memory_bytes - KEPT_BYTES, program, size)

    return found[search_largest(fits, in_proportion, max(config.packs_at_once // unit, 1))]


def forecast(report, target):
    """Figures of a step beside those of the devices that it was compiled for: dict."""
    seconds, flops = report["estimated_seconds"], report["matmul_flops"]
    # The peak is of products in bfloat16; operations of Pallas kernels count as these declare
    is_known = seconds is not None and flops is not None and not report["kernels"]
    return {
        "device_kind": target.devices[0].device_kind,
        "device_memory_bytes": target.accelerator.memory_bytes,
        "peak_share": flops / seconds / target.accelerator.peak_flops if is_known else None,
    }


def empty_batch(features, spec, batch_size):
    """A batch of padding as the input pipeline gives it: dict of int32 and float32 zeros `[B, ...]`.

    `features` are an objective's, `spec` is the `schema.PackSpec` of the records.
    """
    # TFRecords have no int32; the input pipeline narrows their int64
    kinds = {"int64": "int32", "float32": "float32"}
    return {
        one.name: np.zeros((batch_size, spec.size(one.length)), kinds[schema.dtype(one.record_name)])
        for one in features
    }


def _check_folder(folder):
    if folder.exists() and not folder.is_dir():
        raise InputError(f"`compile_only` must be a folder. Received: {folder}, which is a file.")
    if (folder / RUN_FILE).exists():  # whose next start would refuse it for files that are not its own
        raise InputError(f"`compile_only` must not be the output_dir of a run. Received: {folder}.")


def in_units(name, value):
    """A figure of a report for people: str."""
    if value is None:
        return UNKNOWN
    if name.endswith(("bytes", "bytes_accessed")):
        return f"{value / 2**20:,.1f} MiB"
    if name.endswith("flops"):
        return f"{value / 1e9:,.1f} GFLOP"
    if name == "peak_share":
        return f"{value:.1%}".replace("%", " %")
    if name == "estimated_seconds":
        return f"{value * 1e3:.2f} ms"
    return f"{value:.1f} s" if name.endswith("seconds") else str(value)


def _print_report(report, folder):
    tables = ("collectives", "broken_by", "backend")
    values = {name: value for name, value in report.items() if name not in tables}
    rows = [
        {"of one step": name.replace("_", " "), report["backend"]: in_units(name, value)}
        for name, value in values.items()
    ]
    print_table(rows)
    if report["collectives"]:
        print()
        print_table(report["collectives"])
    for line in report["broken_by"]:
        print(f"not static: {line}")
    print(f"written    {folder}")
