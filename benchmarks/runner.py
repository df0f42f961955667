"""Runner of all benchmarks: flags, machine, statistics of interleaved times, tables, JSON and pictures.

A benchmark has a `Settings`, a `DESCRIPTION`, and a `main` that ends with `show`. Its ways are timed by
`bert_packed.runs.interleaved_timing.time_interleaved`: the n-th time of each was taken next to the n-th times
of the others. A ratio of two neighbors cancels what slows the machine for a minute, a ratio of medians does
not.

{"benchmark": "packing_tables", "machine": {"cpu": ..., "date": ..., "commit": ...}, "settings": {...},
 "tables": {"packing": [...]}, "notes": [...]}
"""

import dataclasses
import datetime
import importlib.metadata
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

from bert_packed.core.command_line import OUTPUT_FLAGS
from bert_packed.core.progress import count_of
from bert_packed.core.settings import check_settings, setting
from bert_packed.core.storage import make_folder, write_json, write_whole
from data_gen.jobs.runners import num_cores

PACKAGES = ("numpy", "scipy", "highspy", "tensorflow", "jax", "keras", "torch", "transformers")
# AMD's CPUs have these generations, by family and by whether they have AVX-512
ZEN = {("23", False): "Zen 2", ("25", False): "Zen 3", ("25", True): "Zen 4", ("26", True): "Zen 5"}
FEWEST_FOR_INTERVAL = 6  # values; fewer cannot hold a median with a confidence of 95 %
# A label has the same color in every picture, by its beginning
COLORS = {"packed": "C0", "unpacked": "C1", "padding-free": "seagreen"}
OTHER_COLOR = "0.65"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of the flags of all benchmarks; checks itself, raises `InputError`."""

    json: str = setting("", "also write all tables to this file, with the machine and the flags")

    def __post_init__(self):
        check_settings(self)


def parse_names(text, known):
    """Check names separated by commas, all different and known; raises `ValueError`."""
    names = text.split(",")
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"different ones of {', '.join(known)}, separated by commas")
    return text


def show(benchmark, config, tables, notes=(), digits=4, how="Measured"):
    """Print tables in Markdown, as pages have them, and write them to `config.json`.

    Args:
        benchmark: Name of the command.
        config: `Settings` of the command.
        tables: Dict from name to rows, dicts with equal keys.
        notes: Lines of text below the tables.
        digits: Number of significant digits to print; the JSON has all of them.
        how: Beginning of the sentence about the machine.
    """
    machine = describe_machine()
    for name, rows in tables.items():
        print(f"## {name}\n\n{markdown_table(rows, digits)}\n")
    for note in notes:
        print(f"{note}\n")
    print(f"{how} on {machine_name(machine)}; {machine['date']}, commit {machine['commit']}.")
    # Machine and flags are beside the numbers, which mean nothing without them
    if config.json:
        settings = {
            # A machine's folders mean nothing elsewhere
            name: Path(value).name if str(value).startswith("/") else value
            for name, value in dataclasses.asdict(config).items()
            if name not in OUTPUT_FLAGS
        }
        content = {"benchmark": benchmark, "machine": machine, "settings": settings}
        write_json(config.json, {**content, "tables": tables, "notes": list(notes)})


def markdown_table(rows, digits=4):
    """Format rows, dicts with equal keys, as a table in Markdown."""
    shown = [{name: shown_value(value, digits) for name, value in row.items()} for row in rows]
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def shown_value(value, digits=4):
    """Format a value of a table in the digits that count: 1234.5 -> 1,234 and 0.123456 -> 0.1235."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def describe_machine():
    """CPU, cores, JAX's accelerator, backend, versions of packages, date and commit: dict for JSON."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra
    backend = sys.modules["keras"].backend.backend() if "keras" in sys.modules else ""
    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "device": accelerator_name() if backend == "jax" else "",
        "backend": backend,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": current_commit(),
    }


def machine_name(machine):
    """The accelerator, or the CPU with its cores."""
    return machine.get("device") or f"{count_of(machine['cores'], 'core')} of {machine['cpu']}"


def accelerator_name():
    """Kind of JAX's first device; "" for a CPU."""
    import jax

    first = jax.devices()[0]
    return "" if first.platform == "cpu" else first.device_kind


def current_commit(folder=Path(__file__).parents[1]):
    """The commit of the code, with "+" where its Python files differ from it; "" outside a checkout."""

    def git(*arguments):
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("diff", "--name-only", "HEAD", "--", "*.py") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or a copy without its folder
        return ""


def cpu_name(path="/proc/cpuinfo"):
    """Model of this machine's CPU, of an EPYC with its generation; "unknown" where Linux does not say."""
    try:
        with open(path) as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return "unknown"
    values = {}
    for name, _, value in lines:
        values.setdefault(name.strip(), value.strip())  # the first core stands for all
    name = values.get("model name", "unknown")
    kind = values.get("cpu family"), "avx512f" in values.get("flags", "").split()
    # Many clouds hide the number of an EPYC's model
    return f"{name} ({ZEN[kind]})" if kind in ZEN and "EPYC" in name else name


def ratios(seconds, baseline):
    """`seconds / baseline` of each repeat: list of float."""
    return [ours / theirs for ours, theirs in zip(seconds, baseline, strict=True)]


def median_interval(values, confidence=0.95):
    """Interval that holds the median of infinitely many repeats in a share of all cases: a pair.

    The pair is (None, None) for fewer than `FEWEST_FOR_INTERVAL` values.
    """
    if len(values) < FEWEST_FOR_INTERVAL:
        return None, None
    from scipy.stats import binom  # large, and resident memory is the base of `step_memory.MemoryWatch`

    ranked = sorted(values)
    # Each value is below the median with probability 1/2, whatever the distribution: their number is binomial
    num_outside = int(binom.ppf((1 - confidence) / 2, len(ranked), 0.5))
    low = max(num_outside - 1, 0)
    return ranked[low], ranked[-1 - low]


def median_row(name, values):
    """A median with its interval of 95 %, as columns of a table: `name`, `from`, `to`."""
    low, high = median_interval(values)
    return {name: statistics.median(values), "from": low, "to": high}


def added_row(seconds, baseline):
    """Time added by a part to the time without it, in percent: columns `added, %`, `from`, `to`."""
    return median_row("added, %", [100 * (ratio - 1) for ratio in ratios(seconds, baseline)])


def new_figure(columns, rows=1, size=(4.2, 3.2)):
    """Make a figure with a grid of axes of a size in inches each: the figure, and a list of rows of axes."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_picture(figure, path, dpi=100):
    """Write a PNG, whatever `path` ends in, that appears under its name only when complete."""
    make_folder(Path(path).absolute().parent)
    with write_whole(str(path)) as partial:
        figure.savefig(partial, dpi=dpi, format="png")


def color_of(label):
    """The color of a way in every picture."""
    return next((color for start, color in COLORS.items() if label.startswith(start)), OTHER_COLOR)


def draw_bars(axes, rows, label, column, title):
    """Draw a bar with its number for each row that has a value in a column."""
    rows = [row for row in rows if row[column] is not None]
    labels = [row[label] for row in rows]
    bars = axes.barh(labels, [row[column] for row in rows], color=[color_of(one) for one in labels])
    axes.bar_label(bars, fmt="{:,.4g}" if max(row[column] for row in rows) < 1000 else "{:,.0f}", padding=3)
    axes.margins(x=0.15)  # room for the number of the longest bar
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(title=title, xticks=[])  # each bar has its number


def save_bars(path, rows, label, column, title):
    """Draw one column of a table as bars into a PNG."""
    figure, [[axes]] = new_figure(1, size=(7.5, 0.7 + 0.42 * len(rows)))
    draw_bars(axes, rows, label, column, title)
    save_picture(figure, path)
