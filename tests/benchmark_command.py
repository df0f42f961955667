"""A benchmark as its user runs it, but for the process."""

import dataclasses
import importlib
import json

from tiny import CONFIG

from benchmarks.runner import Settings
from bert_packed.core.command_line import run


def config_class(module):
    """The settings of a benchmark's module."""
    classes = (one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Settings))
    return next(one for one in classes if one.__module__ == module.__name__)


def run_benchmark(name, **flags):
    """The exit status of `python -m benchmarks.NAME --flag=value ...`."""
    module = importlib.import_module(f"benchmarks.{name}")
    argv = [name, *(f"--{flag}={value}" for flag, value in flags.items())]
    return run(module.main, config_class(module), argv)


def tables_of(name, folder, statuses=(0,), **flags):
    """Run a benchmark with `--json` in a folder; its tables, a dict from name to rows."""
    path = folder / f"{name}.json"
    assert run_benchmark(name, json=path, **flags) in statuses
    content = json.loads(path.read_text())
    assert content["benchmark"] == name and content["machine"]["cores"] > 0
    return content["tables"]


def write_config(path, config=CONFIG, **changes):
    """Write a model's config file; returns its path."""
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(config, **changes))))
    return path


def is_png(path):
    """True if a file is a picture."""
    return path.read_bytes().startswith(b"\x89PNG")
