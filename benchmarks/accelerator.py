"""Exactness, speed and largest micro-batch of packed models on a real accelerator, beside peers on torch.

python -m benchmarks.accelerator --json=accelerator.json

Legend: B packs or rows per batch, S their length.
"""

import dataclasses
import functools
import gc
import os
import sys
import time

import numpy as np

from benchmarks.accelerator_steps import GIBIBYTE, PEERS, STEPS, Model, largest_rows, measure_steps
from benchmarks.results import Settings, parse_names, show
from benchmarks.synthetic_data import check_positions, describe_corpus, wikipedia_corpus
from benchmarks.training_steps import first_head, kernel_options, objective_of
from bert_packed.architectures.registry import FLOAT32, MIXED, MODEL_SIZES, without_dropout
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.parallel.targets import accelerator_of, devices_here
from bert_packed.training.engines import choose_backend, make_engine

EXACTNESS, LARGEST = "exactness", "largest"
PARTS = (EXACTNESS, STEPS, PEERS, LARGEST)
DEPTH = 3  # sequences in a pack, as in the papers
NUM_CHECKED, NUM_CHECKED_BLOCKS = 4, 2  # packs and blocks of exactness
TOLERANCES = {FLOAT32: 1e-5, MIXED: 5e-2}  # of the largest value; bfloat16 has 8 bits
# Of gradients in bfloat16: those of biases are sums over all tokens, rounded on the way. Without the mask of
# packs it is 0.8
GRADIENTS, GRADIENT_TOLERANCE = "unpacked: gradients of all weights", 0.2
TERA = 1e12


@dataclasses.dataclass(frozen=True)
class AcceleratorConfig(Settings):
    """Run on a machine with a GPU or TPU, under JAX; TensorFlow and files are not needed.

    exactness: packed against unpacked on the device, outputs, losses and gradients, and the audit of
    neighbors, of the first model's width with two blocks, in float32 and bfloat16. steps: training steps
    in bfloat16 with the recipe's dropout, interleaved, on packs of Wikipedia's lengths at depth 3
    (packing factor 2.0) and on one sequence a row. Both with dense attention, or a Mamba's loop over
    tokens, and with the fused kernel where the platform has one. speed-ups: medians of the ratios of
    neighboring steps, in sequences a second; `from` and `to` are their interval of 95 %. peers:
    transformers on padded rows, and beside a BERT one without padding that is made for the device, both
    on torch (extra `reference`), each in turn in a separate process, beside our fastest step. largest
    micro-batch: tried on the device until it runs out of memory, beside the compiler's plan.

    Parts begin only while there is time for them; "left out" has all others with the reason. On a CPU
    everything but the last part runs, to try the command itself. Exit status 1 where a check of exactness
    or a part fails.
    """

    models: str = setting(
        "bert-base",
        "sizes of models to measure, with commas",
        parse=lambda text: parse_names(text, MODEL_SIZES),
    )
    max_seq_length: int = setting(512, "tokens of a pack and of a row", minimum=16)
    batch_size: int = setting(32, "packs, or rows, a step", minimum=1)
    repeats: int = setting(10, "timed steps of each way", minimum=1)
    minutes: float = setting(8.0, "time limit; parts that do not fit are left out", minimum=0)
    parts: str = setting(
        ",".join(PARTS),
        "what to measure, with commas; a device of few minutes may take one a time",
        parse=lambda text: parse_names(text, PARTS),
    )

    @property
    def sizes(self):
        """Configs of the models by name."""
        return {name: MODEL_SIZES[name] for name in self.models.split(",")}

    @property
    def chosen(self):
        """The parts to measure: list of `PARTS`."""
        return self.parts.split(",")


class TimeLimit:
    """Runs parts while there is time for them; `left_out` are rows of those that were not, with the reason.

    A part is taken to last as long as the slowest of its kind so far, in proportion to its size.
    """

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds
        self._rates = {}  # by kind: seconds by size
        self.left_out = []
        self.has_failed = False

    def run(self, part, work, kind="", size=1):
        """The result of `work()`; None where it is left out, or raised an exception."""
        start = time.monotonic()
        expected, left = self._rates.get(kind, 0.0) * size, self.left()
        if left <= expected:
            reason = f"needs about {expected:.0f} s of {left:.0f} s left" if left > 0 else "the time is over"
            self.leave_out(part, reason)
            return None
        try:
            result = work()
        except TimeoutError:  # of a peer
            self.leave_out(part, "stopped when the time was over")
            return None
        except Exception as error:  # of any library: minutes of a device are dear, and other parts go on
            self.has_failed = True
            self.leave_out(part, f"failed: {' '.join(str(error).split())[:300] or type(error).__name__}")
            return None
        seconds = time.monotonic() - start
        self._rates[kind] = max(self._rates.get(kind, 0.0), seconds / size)
        print(f"{seconds:6.1f} s  {part}", flush=True)
        return result

    def left(self):
        """Seconds left; negative when the time is over."""
        return self._end - time.monotonic()

    def leave_out(self, part, reason):
        """Add a row to `left_out`."""
        print(f"left out  {part}: {reason}", flush=True)
        self.left_out.append({"part": part, "reason": reason})


def main(config):
    """Measure, print and write; returns the exit status."""
    limit = TimeLimit(60 * config.minutes)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    # Before JAX starts: peers share the device, of which JAX would take three quarters for good
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if choose_backend() != "jax":
        raise InputError("KERAS_BACKEND must be jax or empty for this benchmark. Received: tensorflow.")
    for model_config in config.sizes.values():
        check_positions(config.max_seq_length, model_config)
    corpus = wikipedia_corpus(config.max_seq_length, DEPTH)
    device, platform = describe_device(), devices_here().platform
    tables = {
        "device": [device],
        "data": [describe_corpus(corpus)],
        "exactness": exactness(config, corpus, platform, limit) if EXACTNESS in config.chosen else [],
        "steps": [],
        "speed-ups": [],
        "largest micro-batch": [],
    }
    for name, model_config in config.sizes.items():
        model = Model(name, model_config, config, corpus, platform, device["peak, TFLOP/s"] * TERA)
        steps, speed_ups = measure_steps(model, limit)
        tables["steps"] += steps
        tables["speed-ups"] += speed_ups
        gc.collect()  # the memory of its engines
    for name, model_config in config.sizes.items() if LARGEST in config.chosen else ():
        model = Model(name, model_config, config, corpus, platform)
        tables["largest micro-batch"] += largest_rows(model, device["memory, GiB"], limit)
    tables["left out"] = limit.left_out
    has_passed = all(row["failed"] == "none" for row in tables["exactness"])
    notes = ["Measured on a CPU: no figure is an accelerator's."] if platform == "cpu" else []
    show("accelerator", config, tables, notes)
    return int(limit.has_failed or not has_passed)


def describe_device():
    """The first device of JAX: a row of a table."""
    import jax

    from bert_packed.runs.step_cost import measured_flops_per_second

    first = jax.devices()[0]
    known = accelerator_of(first.device_kind)
    memory = (first.memory_stats() or {}).get("bytes_limit")  # None for CPUs
    return {
        "device": first.device_kind,
        "platform": first.platform,
        "memory, GiB": memory and memory / GIBIBYTE,  # that JAX may take
        "peak, TFLOP/s": (known.peak_flops if known else measured_flops_per_second(dtype="bfloat16")) / TERA,
        "peak from": "data sheet" if known else "a product measured here",
    }


def exactness(config, corpus, platform, limit):
    """Packed against unpacked sequences by precision and attention: rows of a table."""
    first = dataclasses.replace(
        without_dropout(next(iter(config.sizes.values()))), num_hidden_layers=NUM_CHECKED_BLOCKS
    )
    head = first_head(first)
    batch = corpus.packed_batch(NUM_CHECKED, first.vocab_size, np.random.default_rng(0), head)
    kernels = {"dense": {}}
    if fused := kernel_options(first, config.max_seq_length, platform):
        kernels["fused"] = fused
    rows = []
    for dtype in TOLERANCES:
        for name, kernel in kernels.items():
            check = functools.partial(exactness_row, first, batch, dtype, kernel)
            if row := limit.run(f"exactness, {dtype}, {name}", check, "exactness"):
                rows.append({"precision": dtype, "attention": name, **row})
    return rows


def exactness_row(model_config, batch, dtype, kernel=None):
    """The audit of a model with random weights on packs: columns of a table.

    `kernel` is of `kernel_options`. Differences are relative to the largest value, except for `neighbors`,
    which must be 0.
    """
    from bert_packed.evaluation.contamination import HIDDEN, KEY_BIAS_TOLERANCE, audit

    objective = objective_of(model_config)
    model = objective.build_model(model_config, seed=0, dtype=dtype, **(kernel or {}))
    engine = make_engine(model, objective, micro_batch_size=len(batch["token_ids"]))
    checks = audit(engine, batch, TOLERANCES[dtype])
    if dtype == MIXED:
        checks = [
            dataclasses.replace(one, tolerance=GRADIENT_TOLERANCE) if one.name == GRADIENTS else one
            for one in checks
            # Rounding decides near a tie, and is all of a gradient that is truly 0
            if "accuracy" not in one.name and one.tolerance != KEY_BIAS_TOLERANCE
        ]

    def largest(*names):
        # NaN too, which Python's `max` may drop
        return float(np.max([one.largest for one in checks if one.name.startswith(names)]))

    return {
        "sequences": int(batch["slot_weights"].sum()),
        "neighbors": largest("neighbors: "),
        "outputs": largest(*(f"unpacked: {name}" for name in (HIDDEN, *objective.outputs))),
        "losses": largest(*(f"unpacked: {name}" for name in ("loss", *objective.losses))),
        "gradients": largest(GRADIENTS),
        "failed": ", ".join(one.name for one in checks if not one.passed) or "none",
    }


if __name__ == "__main__":
    sys.exit(run(main, AcceleratorConfig))
