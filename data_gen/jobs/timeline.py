"""When each phase of a command began and ended, and how long it kept processors busy: what is serial shows.

    start-up        before plan
    |       check inputs  plan       publish
    |-------|---|---------|-|--------|-|
            read sequences  sort sequences, ...

Phases follow one another without a gap: what the command does by itself before a phase is one of its own.
"""

import contextlib
import dataclasses
import os
import time

PROCESS_STAT = "/proc/self/stat"
SHOWN_SECONDS = 0.1
UNNAMED = ""  # until it is known what follows
PLACE_OF_START = 19  # of the field among those after the program's name, which may hold anything


@dataclasses.dataclass
class Phase:
    """One phase; all times in seconds.

    Attributes:
        phase: Its name.
        begin, end: From the start of the command.
        first_step: When the first step of it began that any process has done, from the start of the command;
            None where there was none. From `begin` to here is what starting processes takes.
        parent_cpu: Of processors, for the process that leads.
        workers_cpu: The same for its local workers, their own start included; 0 without any, None where they
            are elsewhere, as those of Apache Beam.
        num_workers: Local processes that did steps of it, besides the one that leads.
    """

    phase: str
    begin: float
    end: float = 0.0
    first_step: float | None = None
    parent_cpu: float = 0.0
    workers_cpu: float | None = 0.0
    num_workers: int = 0


class Timeline:
    """The phases of a command so far.

        timeline = Timeline()                   the first phase, "start-up", began with the process
        timeline.enter("check inputs")
        with timeline.during("read sequences"):
            ...
        timeline.finish()

    Args:
        now: Function that tells the time, on which the workers' clocks agree with it.
        processor_time: Function that tells for how long this process has kept processors busy.
        age: Seconds for which the process has run.
    """

    def __init__(self, now=time.monotonic, processor_time=time.process_time, age=None):
        self._now, self._processor_time = now, processor_time
        self._start = now() - (process_age() if age is None else age)
        self._busy, self._workers = 0.0, {}
        self.phases = [Phase("start-up", 0.0)]

    def enter(self, name):
        """End the phase at hand, and begin another."""
        self.finish()
        self.phases.append(Phase(name, self.phases[-1].end))

    @contextlib.contextmanager
    def during(self, name):
        """A phase as long as a block. What happened since the phase before, if anything, is "before NAME"."""
        self._name_gap(f"before {name}")
        self.enter(name)
        try:
            yield
        finally:
            self.enter(UNNAMED)

    def finish(self, name=""):
        """End the last phase; what happened since the last `during`, if anything, has been `name`."""
        self._name_gap(name)
        last, busy = self.phases[-1], self._processor_time()
        last.end = self._now() - self._start
        last.parent_cpu += busy - self._busy
        self._busy = busy

    def add_step(self, began, worker=None, busy=0.0):
        """Note a step of the phase at hand.

        Args:
            began: When, by `now`.
            worker: Number of the process that did it; None for this one.
            busy: How long that process has kept processors busy since it was started, in seconds.
        """
        phase, began = self.phases[-1], began - self._start
        phase.first_step = began if phase.first_step is None else min(phase.first_step, began)
        if worker is not None:
            seen, numbers = self._workers.get(worker, (0.0, None))
            phase.workers_cpu += busy - seen
            phase.num_workers += numbers is not phase
            self._workers[worker] = busy, phase

    def leave_to_others(self):
        """Say that processes of which nothing is known do the steps of the phase at hand."""
        self.phases[-1].workers_cpu = None

    def _name_gap(self, name):
        if self.phases[-1].phase == UNNAMED and name:
            self.phases[-1].phase = name

    def describe(self):
        """The phases that took a tenth of a second or more, in words."""
        took = {phase.phase: phase.end - phase.begin for phase in self.phases}
        return ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in took.items() if seconds >= SHOWN_SECONDS
        )

    def to_json(self):
        """List of dicts, one a phase, as `Phase` says."""
        return [dataclasses.asdict(phase) for phase in self.phases]


def process_age():
    """Seconds since this process was started; 0 where the system does not tell, which only Linux does."""
    try:
        with open(PROCESS_STAT) as file:
            ticks = int(file.read().rpartition(")")[2].split()[PLACE_OF_START])
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
