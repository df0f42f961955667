"""Resumable jobs of steps, by one process, several, or Apache Beam.

A step is a function of its argument alone. It writes whole files and returns a small result, which is noted
in the job's work folder; a restarted job does only the steps without a note. So the result does not depend
on the runner, the order of steps or the number of kills.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
from tqdm import tqdm

from bert_packed.core import progress, storage
from bert_packed.core.runtime import repeating
from data_gen.jobs.runners import LOCAL, start_workers, telling_lost_workers

SECONDS_BETWEEN_LOOKS = 0.5  # interval at which the progress of workers is read


@dataclasses.dataclass(frozen=True)
class Step:
    """One piece of work of a job."""

    name: str  # unique in its job, and a valid file name
    function: Callable[[Any], Any]  # a module's function, whose result is plain JSON
    argument: Any  # picklable
    size: int = 1  # share of the progress bar, which `progress.advance` moves within the step


@dataclasses.dataclass
class Job:
    """Does steps, notes their results in `work_folder`, and keeps the workers between calls of `run`.

        with Job(output.work_folder, num_workers=2) as job:
            results = job.run([Step("shard-0", write_shard, 0), Step("shard-1", write_shard, 1)], "write")

    One worker is this process.
    """

    work_folder: str  # no other job has it; it is shared by all machines that work on it
    num_workers: int = 1
    runner: str = LOCAL
    seconds: dict = dataclasses.field(default_factory=dict)  # receives the time of each `run`, by its title

    _pool = None
    _counter = None  # the progress of the pool's workers

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        if self._pool is None:
            return
        if kind is not None:
            # Workers would otherwise finish their steps, perhaps in the folder of the next run. Python 3.14
            # has `kill_workers` for it; `active_children` would have the caller's own processes, too
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, steps, title, unit="steps", release=None):
        """Do the steps that are not done yet, and return all results, in the order of the steps.

        `title` and `unit`, of `Step.size`, are for the progress bar. `release` is called with each step once
        it is done, to remove files that only that step needed; after a kill, perhaps again.
        """
        start, release = time.monotonic(), release or (lambda step: None)
        notes = {step.name: self._read_note(step) for step in steps}
        results = {name: note["result"] for name, note in notes.items() if note is not None}
        left = [step for step in steps if step.name not in results]
        total = sum(step.size for step in steps)
        with tqdm(desc=title, unit=f" {unit}", unit_scale=True, total=total, disable=None) as bar:
            for step in steps:
                if step.name in results:
                    release(step)
                    bar.update(step.size)
            for step, result in self._do(left, bar):
                results[step.name] = result
                release(step)
        self.seconds[title] = time.monotonic() - start
        return [results[step.name] for step in steps]

    def _do(self, steps, bar):
        """Do steps in any order, and move the bar: yields (step, result)."""
        if self.runner != LOCAL and steps:
            from data_gen.jobs.beam_runner import run_pipeline  # an extra; its import takes seconds

            work = [(step, self.work_folder) for step in steps]
            run_pipeline(self.runner, do_step, work, self.work_folder)
            for step in steps:
                note = self._read_note(step)
                if note is None:
                    raise OSError(
                        f"{_note_path(self.work_folder, step)} is missing after {self.runner} has ended: "
                        "all its machines must see `output_dir` under one name"
                    )
                bar.update(step.size)  # other machines report only complete steps
                yield step, note["result"]
            return
        if min(self.num_workers, len(steps)) <= 1:
            with progress.following(bar.update):
                for step in steps:
                    yield step, do_step((step, self.work_folder))
            return
        if self._pool is None:
            self._counter = multiprocessing.get_context("spawn").Value("q", 0)
            self._pool = start_workers(self.num_workers, _count_into, self._counter)
        with telling_lost_workers(), _shown(self._counter, bar):
            running = {self._pool.submit(do_step, (step, self.work_folder)): step for step in steps}
            for future in futures.as_completed(running):
                yield running[future], future.result()

    def _read_note(self, step):
        return storage.read_json(_note_path(self.work_folder, step), default=None)


def do_step(work):
    """Do one (step, work folder), note its result and return it as noted, with lists for tuples."""
    step, work_folder = work
    with progress.step(step.size):
        note = json.dumps({"result": step.function(step.argument)})
    storage.write_text(_note_path(work_folder, step), note)
    return json.loads(note)["result"]


def _note_path(work_folder, step):
    return os.path.join(work_folder, f"{step.name}.done")


@contextlib.contextmanager
def _shown(counter, bar):
    """Move the bar by the progress that workers add to a counter during the block."""
    number = counter.get_obj()  # a killed worker may still hold its lock
    shown = number.value

    def show():
        nonlocal shown
        now = number.value
        bar.update(now - shown)
        shown = now

    try:
        with repeating(show, SECONDS_BETWEEN_LOOKS):
            yield
    finally:
        show()


def _count_into(counter):
    """Make this process add its progress to a counter shared with its parent."""

    def add(amount):
        with counter.get_lock():
            counter.get_obj().value += amount

    progress.follow(add)


def write_array(path, array):
    """Write an array to a file that appears when complete."""
    with storage.write_whole(path) as partial, storage.open_file(partial, "wb") as file:
        np.save(file, array)


def read_array(path):
    with storage.open_file(path) as file:
        return np.load(file)
