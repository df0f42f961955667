"""Which of XLA's ways to compile for a CPU a run takes: measured at its start, kept in `run.json`.

XLA reads `XLA_FLAGS` once, when a process compiles first or, under JAX, sees its devices first. So a run
chooses before either.
"""

import dataclasses
import functools
import importlib
import json
import os
import tempfile
import time

import numpy as np

from bert_packed.checkpoints.checkpoint import NAME
from bert_packed.config import config_json
from bert_packed.runs.objectives import choose_objective
from bert_packed.runs.pretraining_config import TrainConfig
from bert_packed.runs.run_directory import read_segments
from bert_packed.runs.step_cost import count_full_steps, estimate_step_seconds
from bert_packed.runs.step_turns import FEWEST_TURNS, TimedStep, time_steps
from bert_packed.runs.this_machine import cpu_name
from bert_packed.runs.xla_ways import DEFAULT, WAYS, way_rows, ways_to_try
from data_gen.jobs.runners import num_cores

LEAST_RUN_SECONDS = 1800  # a shorter run gains less than measuring takes
NUM_TURNS, MOST_SECONDS, SECONDS_TO_BE_READY = 11, 30, 240
NUM_BLOCKS, MOST_TOKENS = 2, 1024  # of the step that is timed
LARGEST_RATIO = 0.97  # another way's time, of the default's; less gain is not worth other rounding
PACKAGES = {"tensorflow": ("keras", "tensorflow"), "jax": ("keras", "jax", "jaxlib")}
# What the time of a step depends on, beside its model and size
STEP_SETTINGS = (
    "input_file",
    "objective",
    "optimizer",
    "mlm_loss",
    "lm_loss",
    "max_grad_norm",
    "dtype",
    "attention",
    "remat",
)


def choose_flags(config, model_config, data, folder, latest, backend, tell):
    """Choose `XLA_FLAGS` for a run and set them in this process, where nothing is compiled yet.

    A run that continues on a machine takes what it chose there, so that it continues bit for bit; on another
    CPU, or with other versions, it measures anew. Nothing is set with `--autotune=false`, where the
    environment has `XLA_FLAGS` already, on several devices, on what is no CPU, for packs of rows, for a run
    that began without a choice, and for one that is expected to end soon.

    Args:
        config, model_config, data: Of the run.
        folder: Its output directory.
        latest: Checkpoint that it continues from, or None.
        backend: The running one.
        tell: Called with lines for people.

    Returns:
        Dict for the run's segment in `run.json`: `xla_flags`, under which it computes. Where it was asked to
        choose also `machine`, by which a continued run knows it again, and `xla_ways`, the rows of what was
        measured now.
    """
    given = os.environ.get("XLA_FLAGS", "")
    segments = read_segments(folder) if latest else []
    chosen = [segment for segment in segments if "machine" in segment]
    is_alone = config.distribution == config.layout == "none" and not data.train.num_rows
    if given or not config.autotune or not is_alone or (latest and not chosen):
        return {"xla_flags": given}
    machine = {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "backend": backend,
        "versions": {name: importlib.import_module(name).__version__ for name in PACKAGES[backend]},
    }
    known = [segment["xla_flags"] for segment in chosen if segment["machine"] == machine]
    flags, rows = known[-1] if known else "", []
    if flags:
        tell(f"xla        {flags}, as before on this machine")
    elif not known:
        first_step = int(NAME.fullmatch(latest.name)[1]) if latest else 0
        if _expected_seconds(config, model_config, data, first_step) >= LEAST_RUN_SECONDS:
            flags, rows = _measure(config, model_config, data, backend, tell)
    if flags:
        os.environ["XLA_FLAGS"] = flags
    return {"xla_flags": flags, "machine": machine, "xla_ways": rows}


def trial_config(config, model_config, data, folder):
    """The config of a smaller step that tells XLA's ways apart: `NUM_BLOCKS` blocks, `MOST_TOKENS` tokens.

    Args:
        config, model_config, data: Of the run.
        folder: Existing folder for the smaller model's config.

    Returns:
        `TrainConfig` of one step of one micro-batch.
    """
    blocks = min(model_config.num_hidden_layers, NUM_BLOCKS)
    path = os.path.join(folder, "model.json")
    with open(path, "w") as file:
        json.dump(config_json(dataclasses.replace(model_config, num_hidden_layers=blocks)), file)
    packs = max(1, min(config.packs_at_once, MOST_TOKENS // data.train.spec.max_seq_length))
    kept = {name: getattr(config, name) for name in STEP_SETTINGS}
    return TrainConfig(**kept, train_batch_size=packs, bert_config_file=path, output_dir="-", autotune=False)


def fastest(rows):
    """The row of the way to take: the default's, unless another one's is clearly less.

    Args:
        rows: Of `way_rows`, of at least `FEWEST_TURNS` turns; the first is the default's.

    Returns:
        The row with the least median of those whose whole interval is below 1 and whose median is at most
        `LARGEST_RATIO`; the first where there is none.
    """
    better = [
        row for row in rows[1:] if row["to"] and row["to"] < 1 and row["times as long"] <= LARGEST_RATIO
    ]
    return min(better, key=lambda row: row["times as long"], default=rows[0])


def _measure(config, model_config, data, backend, tell):
    """Flags to add, and the rows of all ways that were tried."""
    names = ways_to_try(backend)
    if len(names) == 1:
        return "", []
    tell(f"xla        times a step with {', '.join(names[1:])} and without (--autotune=false leaves it out)")
    try:
        with tempfile.TemporaryDirectory() as folder:
            trial = trial_config(config, model_config, data, folder)
            steps = {name: TimedStep(trial, {"XLA_FLAGS": WAYS[name]}) for name in names}
            found = time_steps(steps, NUM_TURNS, MOST_SECONDS, True, SECONDS_TO_BE_READY)
    except OSError as error:  # a full disk, say: no reason not to train
        tell(f"xla        as it is: nothing could be timed: {error}")
        return "", []
    for name, why in found.failed.items():
        tell(f"xla        {name} was not timed: {why}")
    if len(found.seconds.get(DEFAULT, [])) < FEWEST_TURNS:
        tell("xla        as it is" + ("" if found.on_cpu is not False else ": this is no CPU"))
        return "", []
    rows = way_rows({name: found.seconds.get(name, []) for name in names})
    row = fastest(rows)
    if row is rows[0]:
        tell("xla        as it is: none of them is clearly faster here")
    else:
        tell(
            f"xla        {row['XLA_FLAGS']}: {row['times as long']:.2f} of the time ({row['from']:.2f} to "
            f"{row['to']:.2f}, {len(found.seconds[DEFAULT])} turns)"
        )
    return WAYS[row["XLA_FLAGS"]], rows


def _expected_seconds(config, model_config, data, first_step):
    """Roughly how long the steps that are left will take."""
    objective = choose_objective(config.objective, model_config, config)
    flops = functools.partial(objective.model_flops, model_config)
    seconds = estimate_step_seconds(flops, data.train.spec, config.train_batch_size, _numpy_rate())
    return seconds * (count_full_steps(config) - count_full_steps(config, first_step))


def _numpy_rate(size=512, repeats=5):
    """Operations a second of NumPy's matrix product: XLA's must not be asked before its flags are set."""
    matrix, seconds = np.ones((size, size), np.float32), []
    for _ in range(repeats):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
