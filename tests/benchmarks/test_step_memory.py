"""The report on a step's memory: what is watched, and how its bytes become a table."""

import json

import pytest
from tiny import CONFIG

from benchmarks import benchmark_batches, benchmark_engine, step_memory
from benchmarks.benchmark_batches import Batches
from bert_packed import config as model_configs
from bert_packed.core.command_line import run


def command(*flags):
    module = step_memory
    return run(module.main, module.MemoryConfig, module.DESCRIPTION, ["step_memory", *flags])


class Recorder:
    """Stands in for the watch and for the engine, and remembers what was done in which order."""

    largest_growth = total_growth = None

    def __init__(self):
        self.done = []

    def __enter__(self):
        self.done.append("begin")
        return self

    def __exit__(self, *_):
        self.done.append("end")
        self.largest_growth, self.total_growth = 3 * 2**20, 7 * 2**20

    def build(self, *arguments):
        self.done.append(arguments)
        return self

    def train_step(self, batch):
        self.done.append(batch)
        return {"num_sequences": 1.0}

    def count_train_step(self, batch):
        return {"flops": 1.0, "temporary bytes": 2**19 if batch == "batch 0" else 0}


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_growth_is_that_of_model_and_steps(monkeypatch, tmp_path, backend):
    recorder, asked = Recorder(), []
    batches = Batches(["batch 0", "batch 1"], 1.0, 1.0)
    monkeypatch.setattr(step_memory, "choose_backend", lambda: backend)
    monkeypatch.setattr(step_memory, "MemoryWatch", lambda: recorder)
    monkeypatch.setattr(benchmark_engine, "build_engine", recorder.build)
    monkeypatch.setattr(
        benchmark_batches, "make_batches", lambda *of: asked.append(of[1:]) or (batches, None)
    )
    monkeypatch.setattr(model_configs, "load_model_config", {"mine": CONFIG}.get)
    table = tmp_path / "table.json"
    flags = ["--bert_config_file=mine", "--batch_size=6", "--micro_batch_size=2", "--max_seq_length=48"]
    assert command(*flags, "--remat", f"--json={table}") == 0
    counted = {"temporaries, MiB": 0.5} if backend == "jax" else {}
    assert json.loads(table.read_text()) == [
        {"backend": backend, "remat": "true", "process, MiB": 3.0, **counted}
    ]
    assert asked == [("", 48, 3, 6, 2, CONFIG)]
    assert recorder.done == ["begin", (CONFIG, True, 2), "batch 0", "batch 1", "end"]
    # 0 is all of the step's packs at once
    assert command("--bert_config_file=mine", "--batch_size=6", f"--json={table}") == 0
    assert json.loads(table.read_text())[0]["remat"] == "false" and recorder.done[6] == (CONFIG, False, None)


def test_parts_that_are_none_are_refused(capsys):
    assert command("--batch_size=4", "--micro_batch_size=3") == 2
    message = "`micro_batch_size` must divide `batch_size`. Received: micro_batch_size=3, batch_size=4"
    assert message in capsys.readouterr().err
