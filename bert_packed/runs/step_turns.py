"""Training steps under several environments, each in a process of its own, timed in turns.

What XLA reads once, such as `XLA_FLAGS`, cannot change within a process; and two processes one after the
other would compare minutes of a machine as much as flags. So all are started, compile, and then wait for
their turns: one step each, again and again.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path

from bert_packed.runs import timed_step
from bert_packed.runs.pretraining_config import TrainConfig
from data_gen.cli.command_line import to_flagfile

COMMAND = (sys.executable, "-m", timed_step.__name__)
TOP = str(Path(timed_step.__file__).resolve().parents[2])  # of the package, installed or not
FEWEST_TURNS = 6  # of which an interval can be told (`turns.median_interval`)
SECONDS_TO_END = 10  # of a process that answers no more


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A step to take.

    Attributes:
        config: `TrainConfig` of one device; its first records are the batch.
        environment: Dict of environment variables, beside those of this process.
    """

    config: TrainConfig
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """What the turns gave.

    Attributes:
        on_cpu: Whether the first process computes on CPUs; None where it did not come so far.
        seconds: Dict from name to the seconds of its steps, one a turn; the same number for each.
        failed: Dict from the names of those that ended before the last turn to the last line they said.
    """

    on_cpu: bool | None
    seconds: dict[str, list[float]]
    failed: dict[str, str]


def time_steps(steps, num_turns, most_seconds=None, only_on_cpu=False, seconds_to_be_ready=None):
    """Take steps in turns, each in a process of its own.

    Args:
        steps: Dict from name to `TimedStep`.
        num_turns: Timed steps of each.
        most_seconds: No turn begins later than that after the first, but the first `FEWEST_TURNS`; None for
            no limit.
        only_on_cpu: Start the others only where the first computes on CPUs.
        seconds_to_be_ready: Who has not compiled by then is ended; None for no limit.

    Returns:
        `StepTimes`.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # Entered first, and so left last: its threads wait for processes, which have ended by then
        threads = stack.enter_context(futures.ThreadPoolExecutor(len(steps)))
        started = {}

        def start(name):
            path = os.path.join(folder, str(len(started)))
            started[name] = stack.enter_context(_Process(steps[name], path))

        first, *others = steps
        start(first)
        if seconds_to_be_ready:
            why = f"not ready after {seconds_to_be_ready:g} s"
            overdue = threading.Timer(seconds_to_be_ready, _end_unready, [started, why])
            overdue.daemon = True
            overdue.start()
            stack.callback(overdue.cancel)
        on_cpu = started[first].answer().get("on_cpu")
        if on_cpu is None:
            return StepTimes(None, {}, {first: started[first].last_words()})
        if only_on_cpu and not on_cpu:
            return StepTimes(on_cpu, {}, {})
        for name in others:
            start(name)
        if seconds_to_be_ready and overdue.finished.is_set():  # before the others were there to be ended
            _end_unready(started, why)
        list(threads.map(_Process.wait_until_ready, started.values()))
        ready = {name: process for name, process in started.items() if process.is_ready}
        if seconds_to_be_ready:
            overdue.cancel()
        seconds = _take_turns(ready, num_turns, most_seconds)
        failed = {name: started[name].last_words() for name in steps if name not in seconds}
        return StepTimes(on_cpu, seconds, failed)


def _take_turns(processes, num_turns, most_seconds):
    """Seconds of each process's steps by name; who ends between two turns is left out."""
    seconds = {name: [] for name in processes}
    begin = time.monotonic()
    for turn in range(num_turns):
        if turn >= FEWEST_TURNS and most_seconds and time.monotonic() - begin > most_seconds:
            break
        for name in list(seconds)[:: -1 if turn % 2 else 1]:
            found = processes[name].step()
            if found is None:
                del seconds[name]
            else:
                seconds[name].append(found)
    return seconds


def _end_unready(processes, why):
    for process in list(processes.values()):
        if not process.is_ready:
            process.end(why)


class _Process:
    """One `timed_step`, and the talk with it; ends with the block."""

    def __init__(self, step, path):
        flagfile = f"{path}.flags"
        with open(flagfile, "w") as file:
            file.write(to_flagfile(step.config))
        self.is_ready, self._why_ended = False, ""
        self._log = open(f"{path}.log", "w+", errors="replace")  # noqa: SIM115  closed in __exit__
        top = [] if TOP.endswith("-packages") else [TOP]  # Python looks there by itself
        modules = os.pathsep.join([*top, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [*COMMAND, f"--flagfile={flagfile}"],
            # The package of this process, whatever the working directory holds
            env=os.environ | {"PYTHONPATH": modules, "PYTHONSAFEPATH": "1"} | step.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # of what was not sent to a process that has ended
                stream.close()

    def answer(self):
        """Its next answer, a dict; {} where it has ended. What anything else printed is passed over."""
        while (line := self._process.stdout.readline()).endswith("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                said = json.loads(line)
                if isinstance(said, dict):
                    return said
        return {}

    def wait_until_ready(self):
        """Until it is ready or has ended, which `is_ready` tells."""
        while not self.is_ready and (said := self.answer()):
            self.is_ready = "ready" in said

    def step(self):
        """Seconds of a step that it takes now; None where it has ended."""
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer().get("seconds")

    def last_words(self):
        """Why it ended: the last line of its errors where it said one, and how, where it was killed."""
        if self._why_ended:
            return self._why_ended
        try:
            status = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._log.seek(0)
        said = self._log.read().strip().rpartition("\n")[2]
        how = f"killed by signal {-status}" if status < 0 else f"status {status}"
        if not said:
            return how
        return f"{said} ({how})" if status < 0 else said

    def end(self, why=""):
        """End it, for a reason, where it has not ended by itself."""
        if self._process.poll() is None:
            self._why_ended = why
            self._process.kill()
