"""Time of a training step by part of the model, beside the least that this machine's rates allow.

python -m benchmarks.step_profile --bert_config_file=bert-mini --batch_size=8 --picture=profile.png
"""

import collections
import dataclasses
import statistics
import sys
import tempfile
import time

import numpy as np

from benchmarks.pictures import draw_bars, new_figure, save_picture
from benchmarks.results import Settings, show
from benchmarks.step_instructions import core_seconds, read_threads, read_work
from benchmarks.synthetic_data import check_positions, wikipedia_corpus
from benchmarks.training_steps import build_engine, stepping
from bert_packed.architectures.registry import load_model_config
from bert_packed.core.command_line import run
from bert_packed.core.settings import check_divides, setting
from bert_packed.runs.interleaved_timing import time_interleaved
from bert_packed.training.engines import choose_backend
from data_gen.jobs.runners import num_cores

GIGA, MILLI = 1e9, 1e3
DEPTH = 3  # sequences in a pack, as in the papers
ALL = "all"


@dataclasses.dataclass(frozen=True)
class ProfileConfig(Settings):
    """Measures this machine (matrix products of the model's shapes, memory, exponentials), then traces
    training steps and adds up XLA's instructions by the part of the model and by kind: products, sums,
    copies, or anything element by element.

    The table has for each group the milliseconds of a step, the rate of its products or of its reads and
    writes, and the least that it could take: its products at the rate of the best product, its bytes at
    that of memory, its exponentials at theirs, whichever is longest, and which of the three that is. The
    rate of exponentials is that of a program of the backend's compiler, not of the processor.

    On a CPU, instructions that do not depend on one another run at the same time, such as the gradients
    of a product's two factors. So the time of an instruction is what all threads spent on it, divided by
    the number of cores. Rates are of all cores: what one of two cores did alone reached half of the rate
    that it has here. Tracing slows a step, by up to a fifth: the last lines have steps without it.
    """

    bert_config_file: str = setting("bert-mini", "size, or bert_config.json, of the model")
    batch_size: int = setting(8, "packs a step", minimum=1)
    micro_batch_size: int = setting(0, "packs computed at once; 0 = all of the step's", minimum=0)
    max_seq_length: int = setting(512, "tokens per pack", minimum=16)
    repeats: int = setting(7, "traced steps, as many without a trace, and runs of each rate", minimum=1)
    reference: bool = setting(False, "also measure torch's products (extra `reference`), with memory kept")
    picture: str = setting("", "also draw both tables into this PNG")

    def __post_init__(self):
        super().__post_init__()
        check_divides(self, "micro_batch_size", "batch_size")


def main(config):
    """Measure, print, write and draw."""
    choose_backend()
    from benchmarks.machine_rates import measure_rates  # Keras: only now

    model_config = load_model_config(config.bert_config_file)
    check_positions(config.max_seq_length, model_config)
    corpus, rng = wikipedia_corpus(config.max_seq_length, DEPTH), np.random.default_rng(0)
    batch = corpus.packed_batch(config.batch_size, model_config.vocab_size, rng)
    micro = config.micro_batch_size or config.batch_size
    shapes = product_shapes(model_config, micro, config.max_seq_length, batch["prediction_ids"].shape[1])
    rates, rate_rows = measure_rates(shapes, config.repeats, config.reference)
    engine = build_engine(model_config, config.micro_batch_size)
    untraced, traced, work, seconds = trace_steps(engine, batch, config.repeats)
    rows = profile_rows(work, seconds, config.repeats, rates)
    step = statistics.median(untraced)
    least = sum(one.flops for one in work.values()) / rates.products
    notes = [
        f"traced steps: {MILLI * statistics.mean(traced):.1f} ms, cores at instructions: "
        f"{sum(seconds.values()) / sum(traced):.0%}",
        f"steps without a trace: {MILLI * step:.1f} ms ({MILLI * min(untraced):.1f} to "
        f"{MILLI * max(untraced):.1f})",
        f"products at the machine's best rate would take {least:.3f} s of these {step:.3f} s: "
        f"{least / step:.0%}",
    ]
    show("step_profile", config, {"rates": rate_rows, "step": rows}, notes)
    if config.picture:
        draw(rows, rates, config.picture)


def product_shapes(model_config, num_packs, length, num_predictions):
    """Shapes of a step's products, as in `machine_rates`: projections, feed-forward, vocabulary logits."""
    width, inner, tokens = model_config.hidden_size, model_config.intermediate_size, num_packs * length
    logits = (num_packs * num_predictions, width, model_config.vocab_size)
    return {(tokens, width, width), (tokens, width, inner), (tokens, inner, width), logits}


def trace_steps(engine, batch, num_steps):
    """Take steps without a trace, then with one.

    Returns:
        Seconds of both; dict from an instruction to its `Work` in a step; dict from an instruction to its
        seconds in all traced steps, of all threads, divided by the number of cores.
    """
    from bert_packed.training.profiling import Profile

    step, traced = stepping(engine, [batch]), []
    # First without a trace, which slows a step
    untraced = time_interleaved({"step": step}, num_steps)["step"]
    with tempfile.TemporaryDirectory() as folder:
        with Profile(folder, range(num_steps)) as profile:
            for number in range(num_steps):
                with profile.step(number):
                    start = time.perf_counter()
                    step(number)
                    traced.append(time.perf_counter() - start)
        (program,) = engine.step_programs(batch)
        work = read_work(program.text)
        # Only instructions of this program: the trace holds those of others too
        spent = core_seconds(read_threads(folder, set(work)))
    return untraced, traced, work, {name: one / num_cores() for name, one in spent.items()}


def profile_rows(work, seconds, num_steps, rates):
    """Rows of the table, the longest first, then the sums of each kind and of all.

    `work` has the `Work` of an instruction in a step, `seconds` its time in all traced steps.
    """
    groups = collections.defaultdict(list)
    for name in seconds:
        for key in ((work[name].part, work[name].kind), (ALL, work[name].kind), (ALL, "")):
            groups[key].append(name)
    whole = sum(seconds.values()) / num_steps
    rows = []
    for (part, kind), names in groups.items():
        spent = sum(seconds[name] for name in names) / num_steps
        flops, num_bytes, exponentials = (
            sum(getattr(work[name], what) for name in names)
            for what in ("flops", "num_bytes", "exponentials")
        )
        # Work of different kinds may overlap: the longest alone is the least
        limits = rates.least_seconds(flops, num_bytes, exponentials)
        limit = max(limits, key=limits.get)
        rows.append(
            {
                "part": part,
                "what": kind,
                "instructions": len(names),
                "ms": MILLI * spent,
                "share": spent / whole,
                "GFLOP/s": flops / spent / GIGA if flops else None,
                "GB/s": None if flops else num_bytes / spent / GIGA,
                "operations a byte": flops / num_bytes if flops else None,
                "least ms": MILLI * limits[limit],
                "limited by": limit,
                "reached": limits[limit] / spent,
            }
        )
    return sorted(rows, key=lambda row: (row["part"] == ALL, row["what"] == "", -row["ms"]))


def draw(rows, rates, path):
    """Draw milliseconds of each group beside the least, and the roofline of those with products, as PNG."""
    parts = [{**row, "label": f"{row['part']}: {row['what']}"} for row in rows if row["part"] != ALL]
    figure, ((times, roofline),) = new_figure(2, size=(5.5, 4.2))
    draw_bars(times, parts, "label", {"ms": "measured", "least ms": "by the machine's rates"})
    times.set(title="ms of a step")
    products = [row for row in parts if row["GFLOP/s"]]
    intensities = [row["operations a byte"] for row in products]
    # The roof rises with the rate of memory up to this intensity, and is flat from there
    across = sorted({1, rates.products / rates.memory, 2 * max([1, *intensities])})
    least = [min(rates.products, rates.memory * one) / GIGA for one in across]
    roofline.plot(across, least, color="black", label="by the machine's rates")
    for row, intensity in zip(products, intensities, strict=True):
        roofline.plot(intensity, row["GFLOP/s"], "o", label=row["part"])
    roofline.set(title="Roofline", xlabel="operations a byte", ylabel="GFLOP/s", xscale="log", yscale="log")
    roofline.legend(loc="lower right", fontsize="small")
    save_picture(figure, path)


if __name__ == "__main__":
    sys.exit(run(main, ProfileConfig))
