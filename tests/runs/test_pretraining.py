"""Processes of a run: the first writes, all read their own packs, all wait."""

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import write_data

from bert_packed.checkpoints import checkpoint
from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.parallel.processes import Alone
from bert_packed.runs.pretraining import Run
from bert_packed.runs.pretraining_config import PretrainingConfig
from bert_packed.training.metrics_log import Scale, read_rows

pytestmark = pytest.mark.usefixtures("uncompiled_file")


class OneOfTwo(Alone):
    """A process that hears from a test what the first has decided; `num_waits` counts its requests."""

    def __init__(self, index):
        self.index, self.num, self.num_waits = index, 2, 0

    def first_decides(self, decide):
        self.num_waits += 1
        return decide() if self.is_first else "as the first has decided"


@pytest.fixture(scope="module")
def make_process(tmp_path_factory):
    """Function from processes and an output directory to the hooks of a run, and the batches it evaluated."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, num_packs=(9, 11))
    config = PretrainingConfig(
        input_file=f"{folder}/packed-*.tfrecord",
        eval_input_file=f"{folder}/packed-1.tfrecord",
        output_dir=str(folder / "run"),
        bert_config_file=f"{folder}/bert_config.json",
        train_batch_size=8,
        micro_batch_size=4,
        eval_batch_size=4,
        num_train_steps=20,
        keep_checkpoint_max=1,
        export_every=2,
    )
    whole = Run(config)
    whole.read_data()
    engine = whole.build_engine()

    def make(processes, output_dir, first_step=0, evaluation_due=False, **changes):
        output_dir.mkdir(exist_ok=True)
        evaluated = []

        def eval_step(batch):
            evaluated.append(batch["token_ids"])
            return dict.fromkeys(engine.objective.sum_names, 1.0)

        engine.eval_step = eval_step
        hooks = dataclasses.replace(
            whole,
            config=dataclasses.replace(whole.config, **changes),
            processes=processes,
            engine=engine,
            folder=output_dir,
            state={"step": first_step, "evaluation_due": evaluation_due},
        ).hooks(Scale())
        processes.num_waits = 0
        return SimpleNamespace(processes=processes, folder=output_dir, evaluated=evaluated, hooks=hooks)

    return make


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "tensorboard")


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_process_alone_writes_as_others_wait(make_process, tmp_path, capsys, index):
    process = make_process(OneOfTwo(index), tmp_path)
    process.hooks.log({"step": 3, "loss": 2.5})
    process.hooks.show("step 3: loss 2.5")
    assert capsys.readouterr().out == ("" if index else "step 3: loss 2.5\n")
    (process.folder / "run.json").write_text(json.dumps({"flags": {}}))
    for write in (lambda: process.hooks.save(3, {}), lambda: process.hooks.export(4)):
        process.processes.num_waits = 0
        write()
        assert process.processes.num_waits == 1
    process.hooks.save(4, {})
    process.hooks.evaluate(4)
    process.hooks.prune()
    assert process.hooks.shows_progress == (index == 0)
    written = ["checkpoint-4", "eval_metrics.csv", "export-4", "metrics.csv", "run.json"]
    assert names_in(process.folder) == (["run.json"] if index else written)
    if not index:
        assert "\n3,2.5," in (process.folder / "metrics.csv").read_text()
    for name in ("checkpoint-3", "checkpoint-4"):
        (process.folder / name).mkdir(exist_ok=True)
    process.hooks.prune()
    assert ("checkpoint-3" in names_in(process.folder)) == (index == 1)


CONTINUED = {"first_step": 8, "log_steps": 2, "eval_steps": 4}
LOGS = ("metrics.csv", "eval_metrics.csv")


def texts_of(folder):
    return {name: (folder / name).read_text() for name in LOGS}


@pytest.mark.parametrize("log", LOGS)
def test_lost_rows_are_refused_before_a_log_changes(make_process, tmp_path, log):
    folder = tmp_path / "run"
    hooks = make_process(Alone(), folder).hooks
    for step in (2, 4, 6, 8, 10):
        hooks.log({"step": step, "loss": 2.5})
    for step in (4, 8):
        hooks.evaluate(step)
    texts = texts_of(folder)
    first = {name: "".join(text.splitlines(keepends=True)[:2]) for name, text in texts.items()}
    (folder / log).write_text(first[log])
    lost = {"metrics.csv": "3 steps, the first 4", "eval_metrics.csv": "step 8"}[log]
    with pytest.raises(InputError, match=f"{log} must have the row of every logged .* none of {lost}"):
        make_process(Alone(), folder, **CONTINUED)
    assert texts_of(folder) == texts | {log: first[log]}
    make_process(Alone(), folder, **CONTINUED, accept_lost_rows=True)
    steps = [[row["step"] for row in read_rows(folder / name)] for name in LOGS]
    assert steps == [["2", "4", "6", "8"], ["4", "8"]]
    # Nothing is missing where the rows are there, or an evaluation is made again
    make_process(Alone(), folder, **CONTINUED)
    (folder / "eval_metrics.csv").write_text(first["eval_metrics.csv"])
    make_process(Alone(), folder, **CONTINUED, evaluation_due=True)
    # A process that writes no logs misses none
    make_process(OneOfTwo(1), tmp_path / "other", **CONTINUED)
    assert names_in(tmp_path / "other") == []


def test_logs_are_on_the_disk_before_a_checkpoint(make_process, tmp_path, monkeypatch):
    done, save = [], checkpoint.save_checkpoint
    monkeypatch.setattr(storage, "flush_to_disk", lambda path: done.append(Path(path).name))
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda *of: done.append("saved") or save(*of))
    process = make_process(OneOfTwo(0), tmp_path / "run")
    done.clear()
    process.hooks.save(3, {})
    assert done[:3] == [*LOGS, "saved"]


def test_each_process_has_its_part_of_every_batch(make_process, tmp_path):
    """A part of each micro-batch in training; the engine adds up what all processes have."""
    trained, evaluated = [], []
    for name, processes in (("whole", Alone()), ("0", OneOfTwo(0)), ("1", OneOfTwo(1))):
        process = make_process(processes, tmp_path / name)
        trained.append([batch["token_ids"] for batch in itertools.islice(process.hooks.batches(0), 2)])
        process.hooks.evaluate(1)
        evaluated.append(process.evaluated)
    for whole, first, second in zip(*trained, strict=True):
        assert len(whole) == 8 and len(np.unique(whole, axis=0)) == 8
        np.testing.assert_array_equal(first, whole[[0, 1, 4, 5]])
        np.testing.assert_array_equal(second, whole[[2, 3, 6, 7]])
    assert [len(batches) for batches in evaluated] == [3, 3, 3]
    for whole, first, second in zip(*evaluated, strict=True):
        np.testing.assert_array_equal(np.concatenate([first, second]), whole)


def test_growing_batches_read_on_where_steps_ended(make_process, tmp_path):
    """Two steps of one micro-batch, then steps of two."""
    process = make_process(Alone(), tmp_path / "run", initial_batch_size=4, batch_warmup_steps=2)
    whole = [batch["token_ids"] for batch in itertools.islice(process.hooks.batches(0), 4)]
    assert [np.count_nonzero(step.any(axis=1)) for step in whole] == [4, 4, 8, 8]
    for first_step in (1, 2, 3):
        resumed = next(process.hooks.batches(first_step))
        np.testing.assert_array_equal(resumed["token_ids"], whole[first_step])


def test_each_process_notes_its_packs_of_a_skipped_step(make_process, tmp_path, capsys):
    noted = []
    for index in (0, 1):
        process = make_process(OneOfTwo(index), tmp_path / f"{index}")
        with contextlib.closing(process.hooks.batches(0)) as batches:
            next(batches)
            process.hooks.tell_skipped(1, "nsp_loss inf", batches.sources)
            process.hooks.tell_skipped(2, "nsp_loss nan", batches.sources)
        line, later = (process.folder / f"skipped_steps.{index}.jsonl").read_text().splitlines()
        assert [json.loads(one)["step"] for one in (line, later)] == [1, 2]
        noted.append({(file, n) for file, numbers in json.loads(line)["packs"].items() for n in numbers})
        assert "step 1 is left out, the weights stay: nsp_loss inf" in capsys.readouterr().err
    assert [len(packs) for packs in noted] == [4, 4] and not noted[0] & noted[1]
