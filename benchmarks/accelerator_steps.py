"""Training steps on an accelerator: speed of ours and of peers on torch, and the largest micro-batch.

Parts of `accelerator.py`. Importing this imports no backend: a command chooses it first.
"""

import dataclasses
import functools
import gc
import importlib.util
import statistics
from concurrent import futures

import numpy as np

from benchmarks.synthetic_data import sums_of_a_row
from benchmarks.timing import median_row, ratios
from benchmarks.training_steps import build_engine, first_head, kernel_options, objective_of, stepping
from bert_packed.architectures.registry import MIXED, PRETRAINING
from bert_packed.runs.interleaved_timing import time_interleaved

STEPS, PEERS = "steps", "peers"  # of `AcceleratorConfig.parts`
NUM_BATCHES = 2  # of each way
PACKED, FUSED, UNPACKED = "packed, dense", "packed, fused", "unpacked, dense"
PADDED, PADDING_FREE = "transformers, padded", "padding-free"
GIBIBYTE = 2**30


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to measure, and what with."""

    name: str
    config: object
    settings: object  # `AcceleratorConfig`
    corpus: object
    platform: str
    peak: float | None = None  # operations a second

    @property
    def num_blocks(self):
        return self.config.num_hidden_layers

    def batches(self, make, size=0, number=NUM_BATCHES):
        """Batch dicts by a method of the corpus, `packed_batch` or `unpacked_batch`."""
        rng, size = np.random.default_rng(0), size or self.settings.batch_size
        return [make(size, self.config.vocab_size, rng, first_head(self.config)) for _ in range(number)]


def measure_steps(model, limit):
    """Steps of all ways, ours and the peers': rows of two tables, speeds and speed-ups."""
    if not {STEPS, PEERS} & set(model.settings.chosen):
        return [], []
    size, repeats = model.num_blocks, model.settings.repeats
    ways = {}
    kernels = our_kernels(model)
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
            # Rows of one sequence each, or the same sequences as in packs
            factor = model.corpus.plan.packing_factor if name == PADDED else 1.0
            gains = [factor * gain for gain in ratios(seconds[name], seconds[best])]
            speed_ups.append(speed_up_row(model, f"{best}, over {name}", gains))
    return steps, speed_ups


def our_kernels(model):
    """Ways to compute packs: dict from name to `kernel_options`, of which `PACKED` has none."""
    fused = kernel_options(model.config, model.settings.max_seq_length, model.platform)
    return {PACKED: {}, **({FUSED: fused} if fused else {})}


def our_ways(model, way, kernel):
    """Compiled steps of ours: dict from name to a function of the repeat for `time_interleaved`.

    `way` and `kernel` are of `our_kernels`; beside `PACKED` there is also `UNPACKED`.
    """
    packs, rows = map(model.batches, (model.corpus.packed_batch, model.corpus.unpacked_batch))
    steps = {way: (build_engine(model.config, dtype=MIXED, **kernel), packs)}
    if way == PACKED:
        steps[UNPACKED] = steps[PACKED][0], rows
    # Traced one by one and compiled together; a step with the same shapes then takes the compiled program
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
    kinds = ("varlen", "flex") if model.platform == "gpu" else ("one by one",)
    packs, rows = map(model.batches, (model.corpus.packed_batch, model.corpus.unpacked_batch))
    padded = {"padded": rows}
    found = {PADDED: functools.partial(transformers_training, model.config, padded, is_mixed=True)}
    for kind in kinds if first_head(model.config) == PRETRAINING else ():  # it is a BERT
        name = f"{PADDING_FREE}, {kind}" + (", attention without dropout" if kind == "flex" else "")
        found[name] = functools.partial(padding_free_training, model.config, packs, kind, is_mixed=True)
    return found


def time_peer(start, seconds, name, best, ours, repeats):
    """Interleave a peer's steps with ours, none of its calls over `seconds`: seconds of both by name."""
    given = ["padded"] if name == PADDED else []
    with start(seconds=seconds) as peer:
        theirs = functools.partial(peer.call, "step", *given)
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


def largest_rows(model, memory_gib, limit):
    """Micro-batches that were tried on the device: rows of a table, the plan of the compiler beside."""
    part = f"{model.name}, largest micro-batch"
    if memory_gib is None:
        limit.leave_out(part, "the device reports no memory to fill")
        return []
    from bert_packed.training.step_report import search_largest, size_that_fills

    rows, programs = [], {}

    def fits(size):
        work = functools.partial(try_size, model, size)
        tried = limit.run(f"{part}, {size}", work, "programs", model.num_blocks)
        if tried is None:
            return None
        programs[size], has_run = tried
        planned = programs[size] and programs[size].peak_bytes / GIBIBYTE
        rows.append(
            {
                "model": model.name,
                "packs at once": size,
                "planned, GiB": planned,
                "memory, GiB": memory_gib,
                "fits by plan": planned and planned <= memory_gib,
                "runs": has_run,
            }
        )
        return has_run

    def in_proportion(size):
        return size_that_fills(memory_gib * GIBIBYTE, programs[size], size)

    search_largest(fits, in_proportion, model.settings.batch_size)
    return rows


def try_size(model, size):
    """A step of two micro-batches of a size: (`StepProgram`, None where it does not compile; True if it ran).

    Two, since a run of several has gradients to add up.
    """
    from bert_packed.training.backend import out_of_memory_names
    from bert_packed.training.step_report import jax_program

    (batch,) = model.batches(model.corpus.packed_batch, 2 * size, 1)
    gc.collect()  # the memory of the try before
    kernel = kernel_options(model.config, model.settings.max_seq_length, model.platform)
    program = None
    try:
        with out_of_memory_names("a try", "batch_size"):
            engine = build_engine(model.config, size, dtype=MIXED, **kernel)
            program = jax_program(engine.compiled_train_step.lower(*engine.step_arguments(batch)))
            float(engine.train_step(batch)["num_sequences"])
    except MemoryError:
        return program, False
    return program, True
