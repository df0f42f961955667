"""Exactness and speed of packed models on a real accelerator, beside peers on torch.

python -m benchmarks.accelerator --json=accelerator.json

Legend: B packs or rows per batch, S their length.
"""

import dataclasses
import functools
import gc
import importlib.util
import os
import statistics
import sys
import time
from concurrent import futures

import numpy as np

from benchmarks.runner import Settings, median_row, parse_names, ratios, save_bars, show
from benchmarks.synthetic_data import check_positions, describe_corpus, sums_of_a_row, wikipedia_corpus
from benchmarks.training_steps import build_engine, first_head, kernel_options, objective_of, stepping
from bert_packed.architectures.registry import FLOAT32, MIXED, MODEL_SIZES, PRETRAINING, without_dropout
from bert_packed.core.command_line import run
from bert_packed.core.settings import InputError, setting
from bert_packed.parallel.targets import accelerator_of, devices_here
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend, make_engine

PARTS = EXACTNESS, STEPS, PEERS = "exactness", "steps", "peers"
DEPTH = 3  # sequences in a pack, as in the papers
NUM_CHECKED, NUM_CHECKED_BLOCKS = 4, 2  # packs and blocks of exactness
TOLERANCES = {FLOAT32: 1e-5, MIXED: 5e-2}  # relative to the largest value; bfloat16 has 8 bits
# Gradients of biases are sums over all tokens, which bfloat16 rounds on the way. Without the mask of packs
# they differ by 0.8
GRADIENTS, GRADIENT_TOLERANCE = "unpacked: gradients of all weights", 0.2
NUM_BATCHES = 2  # of each way
PACKED, FUSED, UNPACKED = "packed, dense", "packed, fused", "unpacked, dense"
PADDED, PADDING_FREE = "transformers, padded", "padding-free"
TERA, GIBIBYTE = 1e12, 2**30


@dataclasses.dataclass(frozen=True)
class AcceleratorConfig(Settings):
    """Run on a machine with a GPU or TPU, under JAX; TensorFlow and files are not needed.

    exactness: packed against unpacked on the device, outputs, losses and gradients, and the audit of
    neighbors, of each model's width with two blocks, in float32 and bfloat16. steps: training steps
    in bfloat16 with the recipe's dropout, interleaved, on packs of Wikipedia's lengths at depth 3
    (packing factor 2.0) and on one sequence a row. Both with dense attention, or a Mamba's loop over
    tokens, and with the fused kernel where the platform has one. speed-ups: medians of the ratios of
    neighboring steps, in sequences a second; `from` and `to` are their interval of 95 %. peers:
    transformers on padded rows, and beside a BERT one without padding that is made for the device, both
    on torch (extra `reference`), one after the other in a separate process, beside our fastest step.

    Parts begin only while there is time for them; "left out" has all others with the reason. On a CPU
    everything runs, to try the command itself. Exit status 1 where a check of exactness or a part fails.
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
    picture: str = setting("", "also draw real tokens a second of all steps into this PNG")

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


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to measure, and what with."""

    name: str
    config: object
    settings: object  # `AcceleratorConfig`
    corpus: object
    platform: str
    peak: float  # operations a second

    def batches(self, make):
        """Batch dicts by a method of the corpus, `packed_batch` or `unpacked_batch`."""
        rng, size = np.random.default_rng(0), self.settings.batch_size
        return [make(size, self.config.vocab_size, rng, first_head(self.config)) for _ in range(NUM_BATCHES)]


def main(config):
    """Measure, print, write and draw; returns the exit status."""
    limit = TimeLimit(60 * config.minutes)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    # JAX reads this as it starts, and would take three quarters of the device, which peers share, for good
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if choose_backend() != "jax":
        raise InputError("KERAS_BACKEND must be jax or empty for this benchmark. Received: tensorflow.")
    for model_config in config.sizes.values():
        check_positions(config.max_seq_length, model_config)
    corpus = wikipedia_corpus(config.max_seq_length, DEPTH)
    device, platform = describe_device(), devices_here().platform
    tables = {"device": [device], "data": [describe_corpus(corpus)], "steps": [], "speed-ups": []}
    tables["exactness"] = [
        {"model": name, **row}
        for name, model_config in config.sizes.items()
        if EXACTNESS in config.chosen
        for row in exactness(name, model_config, corpus, platform, limit)
    ]
    for name, model_config in config.sizes.items():
        model = Model(name, model_config, config, corpus, platform, device["peak, TFLOP/s"] * TERA)
        steps, speed_ups = measure_steps(model, limit)
        tables["steps"] += steps
        tables["speed-ups"] += speed_ups
        gc.collect()  # the memory of its engines
    tables["left out"] = limit.left_out
    has_passed = all(row["failed"] == "none" for row in tables["exactness"])
    notes = ["Measured on a CPU: no figure is an accelerator's."] if platform == "cpu" else []
    show("accelerator", config, tables, notes)
    if config.picture:
        title = f"real tokens a second, {config.batch_size} rows of {config.max_seq_length}"
        save_bars(config.picture, tables["steps"], "way", "real tokens/s", title)
    return int(limit.has_failed or not has_passed)


def describe_device():
    """The first device of JAX: a row of a table."""
    import jax

    from bert_packed.runs.run_summary import measured_flops_per_second

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


def exactness(name, model_config, corpus, platform, limit):
    """Packed against unpacked sequences by precision and attention: rows of a table."""
    first = dataclasses.replace(without_dropout(model_config), num_hidden_layers=NUM_CHECKED_BLOCKS)
    head = first_head(first)
    batch = corpus.packed_batch(NUM_CHECKED, first.vocab_size, np.random.default_rng(0), head)
    kernels = {"dense": {}}
    if fused := kernel_options(first, len(corpus.histogram), platform):
        kernels["fused"] = fused
    rows = []
    for dtype in TOLERANCES:
        for attention, kernel in kernels.items():
            check = functools.partial(exactness_row, first, batch, dtype, kernel)
            if row := limit.run(f"{name}, exactness, {dtype}, {attention}", check, "exactness"):
                rows.append({"precision": dtype, "attention": attention, **row})
    return rows


def exactness_row(model_config, batch, dtype, kernel=None):
    """The audit of a model with random weights on packs: columns of a table.

    `kernel` comes from `kernel_options`. Differences are relative to the largest value, except for
    `neighbors`, which must be 0.
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
        # NaN must count, too, which Python's `max` may drop
        return float(np.max([one.largest for one in checks if one.name.startswith(names)]))

    return {
        "sequences": int(batch["slot_weights"].sum()),
        "neighbors": largest("neighbors: "),
        "outputs": largest(*(f"unpacked: {name}" for name in (HIDDEN, *objective.outputs))),
        "losses": largest(*(f"unpacked: {name}" for name in ("loss", *objective.losses))),
        "gradients": largest(GRADIENTS),
        "failed": ", ".join(one.name for one in checks if not one.passed) or "none",
    }


def measure_steps(model, limit):
    """Steps of all ways, ours and the peers': rows of two tables, speeds and speed-ups."""
    if not {STEPS, PEERS} & set(model.settings.chosen):
        return [], []
    size, repeats = model.config.num_hidden_layers, model.settings.repeats
    ways, kernels = {}, {PACKED: {}}
    if fused := kernel_options(model.config, model.settings.max_seq_length, model.platform):
        kernels[FUSED] = fused
    if STEPS not in model.settings.chosen:
        kernels = dict([kernels.popitem()])  # the fastest, beside which peers are timed
    for way, kernel in kernels.items():
        compiled = functools.partial(our_ways, model, way, kernel)
        ways |= limit.run(f"{model.name}, programs, {way}", compiled, "programs", size) or {}
    if next(iter(kernels)) not in ways:
        limit.leave_out(f"{model.name}, timed steps and peers", "no compiled steps")
        return [], []
    timed = functools.partial(time_interleaved, ways, repeats)
    steps, speed_ups = [], []
    if STEPS in model.settings.chosen and (
        seconds := limit.run(f"{model.name}, timed steps", timed, "timed", size * repeats)
    ):
        steps += [step_row(model, way, times) for way, times in seconds.items()]
        speed_ups += our_speed_ups(model, seconds)
    best = FUSED if FUSED in ways else PACKED
    is_alone = not steps  # then ours is in the table beside each peer
    for name, start in peers(model, limit).items():
        compare = functools.partial(time_peer, start, limit.left(), name, best, ways[best], repeats)
        if seconds := limit.run(f"{model.name}, {name}", compare, "peer", size):
            steps += [
                step_row(model, way, times) for way, times in seconds.items() if way == name or is_alone
            ]
            # Padded rows hold one sequence each; other peers have the same sequences as the packs
            factor = model.corpus.plan.packing_factor if name == PADDED else 1.0
            gains = [factor * gain for gain in ratios(seconds[name], seconds[best])]
            speed_ups.append(speed_up_row(model, f"{best}, over {name}", gains))
    return steps, speed_ups


def our_ways(model, way, kernel):
    """Compiled steps of ours, of `UNPACKED` beside `PACKED`: dict from name to a function of the repeat."""
    packs, rows = map(model.batches, (model.corpus.packed_batch, model.corpus.unpacked_batch))
    steps = {way: (build_engine(model.config, dtype=MIXED, **kernel), packs)}
    if way == PACKED:
        steps[UNPACKED] = steps[PACKED][0], rows
    # They are traced one by one and compiled together; a step with the same shapes then takes that program
    lowered = [
        engine.compiled_train_step.lower(*engine.step_arguments(batches[0]))
        for engine, batches in steps.values()
    ]
    with futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), lowered))
    return {way: stepping(engine, batches) for way, (engine, batches) in steps.items()}


def peers(model, limit):
    """Peers on torch: dict from name to a function with `seconds`, to a context manager of `PeerProcess`."""
    from benchmarks.peers.training import padding_free_training, transformers_training

    if PEERS not in model.settings.chosen:
        return {}
    if model.platform not in ("cpu", "gpu"):
        limit.leave_out(f"{model.name}, peers", f"torch does not compute on a {model.platform.upper()} here")
        return {}
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        limit.leave_out(f"{model.name}, peers", "pip install -e '.[reference]' brings torch and transformers")
        return {}
    kinds = ("nested tensors", "flex") if model.platform == "gpu" else ("one by one",)
    packs, rows = map(model.batches, (model.corpus.packed_batch, model.corpus.unpacked_batch))
    found = {PADDED: functools.partial(transformers_training, model.config, {PADDED: rows}, is_mixed=True)}
    for kind in kinds if first_head(model.config) == PRETRAINING else ():  # it is a BERT
        name = f"{PADDING_FREE}, {kind}" + (", attention without dropout" if kind == "flex" else "")
        found[name] = functools.partial(padding_free_training, model.config, packs, kind, is_mixed=True)
    return found


def time_peer(start, seconds, name, best, ours, repeats):
    """Interleave a peer's steps with ours, none of its calls over `seconds`: seconds of both by name."""
    with start(seconds=seconds) as peer:
        theirs = functools.partial(peer.call, "step", *([PADDED] if name == PADDED else []))
        for repeat in range(NUM_BATCHES):  # compiles for each
            theirs(repeat)
        return time_interleaved({best: ours, name: theirs}, repeats)


def step_row(model, way, times):
    """Speed of a way: a row of a table."""
    sums = sums_of_a_row(model.corpus, way not in (UNPACKED, PADDED), first_head(model.config))
    rate = model.settings.batch_size / statistics.median(times)
    flops = rate * objective_of(model.config).model_flops(model.config, sums)
    return {
        "model": model.name,
        "way": way,
        "s/step": statistics.median(times),
        "sequences/s": rate * sums["num_sequences"],
        "real tokens/s": rate * sums["num_tokens"],
        "share of the peak, %": 100 * flops / model.peak,
    }


def our_speed_ups(model, seconds):
    """Speed-ups between ways of ours: rows of a table."""
    shares = ratios(seconds[UNPACKED], seconds[PACKED])
    factor = model.corpus.plan.packing_factor
    rows = [
        speed_up_row(model, "packed over unpacked, dense", [factor * share for share in shares]),
        speed_up_row(model, "share of the packing factor", shares),
    ]
    if FUSED in seconds:
        rows.append(speed_up_row(model, f"{FUSED}, over dense", ratios(seconds[PACKED], seconds[FUSED])))
    return rows


def speed_up_row(model, figure, values):
    """A speed-up with its interval: a row of a table."""
    return {"model": model.name, "figure": figure, **median_row("median", values)}


if __name__ == "__main__":
    sys.exit(run(main, AcceleratorConfig))
