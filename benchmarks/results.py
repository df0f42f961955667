"""Results of a benchmark: tables on standard output, and JSON that says where and how they were measured.

{"benchmark": "packing_tables", "machine": {"cpu": ..., "date": ..., "commit": ...}, "settings": {...},
 "tables": {"packing": [...]}}
"""

import dataclasses
import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

from bert_packed.core.command_line import OUTPUT_FLAGS, print_table
from bert_packed.core.settings import check_settings, setting
from bert_packed.core.storage import write_json
from data_gen.jobs.runners import num_cores

PACKAGES = ("numpy", "scipy", "highspy", "tensorflow", "jax", "keras", "torch", "transformers", "keras-hub")
# Generations of AMD's CPUs, by family and by whether they have AVX-512
ZEN = {("23", False): "Zen 2", ("25", False): "Zen 3", ("25", True): "Zen 4", ("26", True): "Zen 5"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of the flags of all benchmarks; checks itself, raises `InputError`."""

    json: str = setting("", "also write all tables to this file, with the machine and the flags")

    def __post_init__(self):
        check_settings(self)


def parse_names(text, known):
    """Different ones of some names, with commas; raises `ValueError`."""
    names = text.split(",")
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"different ones of {', '.join(known)}, separated by commas")
    return text


def show(benchmark, config, tables, notes=()):
    """Print tables under their names and lines behind them, and write all to `config.json`.

    Args:
        benchmark: Name of the command.
        config: A `Settings`.
        tables: Dict from name to rows, dicts with equal keys.
        notes: Lines of text.
    """
    machine = describe_machine()
    print(f"CPU: {machine['cpu']}, {machine['cores']} cores{machine['backend'] and ', '}{machine['backend']}")
    for name, rows in tables.items():
        print(f"\n{name}")
        print_table(rows)
    for note in notes:
        print(f"\n{note}")
    # Machine and flags beside the numbers, which mean nothing without them
    if config.json:
        settings = {
            name: value for name, value in dataclasses.asdict(config).items() if name not in OUTPUT_FLAGS
        }
        content = {"benchmark": benchmark, "machine": machine, "settings": settings}
        write_json(config.json, {**content, "tables": tables, "notes": list(notes)})


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
    for name, _, value in lines:  # of the first of all cores
        values.setdefault(name.strip(), value.strip())
    name = values.get("model name", "unknown")
    kind = values.get("cpu family"), "avx512f" in values.get("flags", "").split()
    # Many clouds hide the number of an EPYC's model
    return f"{name} ({ZEN[kind]})" if kind in ZEN and "EPYC" in name else name
