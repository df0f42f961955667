"""`--compile_only`: compile a run's step for its real shapes, write program and report, train nothing."""

from pathlib import Path

import numpy as np

from bert_packed import schema
from bert_packed.config import ablate, load_model_config, override_dropout
from bert_packed.core.command_line import print_table
from bert_packed.core.settings import InputError
from bert_packed.core.storage import write_json, write_text
from bert_packed.core.versions import versions
from bert_packed.runs.pretraining import build_engine
from bert_packed.runs.pretraining_data import check_fits, read_shapes
from bert_packed.runs.run_directory import RUN_FILE
from bert_packed.training.backend import make_virtual_devices, out_of_memory_names
from bert_packed.training.step_report import describe_step, is_static

PROGRAM_FILE, REPORT_FILE = "step.hlo.txt", "step.json"
# The step breaks the static-graph contract; it is reported all the same
STATUS_NOT_STATIC = 4
UNKNOWN = "not told"


def compile_run(config, backend):
    """Compile the step of a run, write its program and its report, and print a table.

    No output directory is read or written. Returns the exit status, 0 or `STATUS_NOT_STATIC`. Raises
    `InputError` where the records or flags cannot be used, or the folder is another run's.
    """
    folder = Path(config.compile_only)
    _check_folder(folder)
    if config.num_virtual_devices:
        # Before anything asks the backend for its devices, after which their number is fixed
        make_virtual_devices(config.num_virtual_devices)
    data = read_shapes(config)
    model_config = override_dropout(load_model_config(config.bert_config_file, data.train.vocab_size), config)
    model_config = ablate(model_config, config.ablation)
    check_fits(data, model_config, config)
    programs = compile_step(config, model_config, data)
    report = {"backend": backend, **describe_step(programs)}
    # A report for fewer devices would be read as one for all of them
    if config.num_virtual_devices not in (0, report["devices"]):
        raise InputError(
            f"`num_virtual_devices` must be as many as the step runs on, which is {report['devices']}. "
            f"Received: {config.num_virtual_devices}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for number, program in enumerate(programs):
        name = PROGRAM_FILE if len(programs) == 1 else PROGRAM_FILE.replace("step", f"step-{number}")
        write_text(str(folder / name), program.text)
    made_by = versions(("bert_packed", "keras", "tensorflow", "jax", "jaxlib"))
    write_json(folder / REPORT_FILE, {**report, "versions": made_by})
    _print_report(report, folder)
    return 0 if is_static(report) else STATUS_NOT_STATIC


def compile_step(config, model_config, data):
    """List of the `StepProgram`s of a run's training step, over the devices that the backend sees."""
    engine = build_engine(config, model_config, data)
    if config.layout != "none":
        print(engine.replicas.layout.describe(model_config))
    batch = empty_batch(engine.objective.features, data.train.spec, config.train_batch_size)
    with out_of_memory_names("the compilation of a step", "micro_batch_size"):
        return engine.step_programs(batch)


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


def _print_report(report, folder):
    tables = ("collectives", "broken_by", "backend")
    values = {name: value for name, value in report.items() if name not in tables}
    rows = [
        {"of one step": name.replace("_", " "), report["backend"]: UNKNOWN if value is None else value}
        for name, value in values.items()
    ]
    print_table(rows)
    if report["collectives"]:
        print()
        print_table(report["collectives"])
    for line in report["broken_by"]:
        print(f"not static: {line}")
    print(f"written    {folder}")
