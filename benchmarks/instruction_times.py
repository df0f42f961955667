"""How long each instruction of a program kept cores busy, by a trace of XLA's threads on a CPU.

XLA calls an instruction on one thread, which may hand out parts of it, tasks, to others; what does not wait
for it is called meanwhile. A trace has the name on the first thread alone. Of a task it has where
it was handed out, and from when to when a thread was at it.
"""

import collections
import dataclasses
from pathlib import Path

from bert_packed.core.settings import InputError

# Events of XLA's pool of threads, the first two with the task's number
HANDED_OUT, TASK_STARTS, TASK_STOPS = (
    f"ThreadpoolListener::{name}" for name in ("Record", "StartRegion", "StopRegion")
)
HANDED_OUT_NUMBER, TASK_NUMBER = "_p", "_c"  # what the trace calls it


@dataclasses.dataclass(frozen=True)
class HandingOut:
    """That a task was handed out.

    Attributes:
        task: Its number.
    """

    task: int


def read_threads(folder, names):
    """What threads did, by a trace of `training.profiling.Profile`.

    Args:
        folder: Of the trace.
        names: Of the instructions, a set; other events are left out.

    Returns:
        As `core_seconds` takes it, times in seconds.

    Raises:
        InputError: no instruction of these is in the trace, as on devices that trace kernels.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    threads = []
    for path in Path(folder).rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        threads += [_read_thread(plane, line, names) for plane in space.planes for line in plane.lines]
    if not any(isinstance(what, str) for spans in threads for _, _, what in spans):
        raise InputError("a trace must tell of XLA's instructions. Received: none; only CPUs are known to.")
    return threads


def _read_thread(plane, line, names):
    titles = {number: event.name for number, event in plane.event_metadata.items()}
    keys = {number: stat.name for number, stat in plane.stat_metadata.items()}
    spans, started = [], []
    for event in sorted(line.events, key=lambda event: event.offset_ps):
        title = titles.get(event.metadata_id)
        start, end = event.offset_ps / 1e12, (event.offset_ps + event.duration_ps) / 1e12
        if title in names:
            spans.append((start, end, title))
        elif title == HANDED_OUT:
            spans.append((start, end, HandingOut(_number(event, keys, HANDED_OUT_NUMBER))))
        elif title == TASK_STARTS:
            started.append((start, _number(event, keys, TASK_NUMBER)))
        elif title == TASK_STOPS and started:  # a trace may begin inside a task
            begin, task = started.pop()
            spans.append((begin, end, task))
    return spans


def _number(event, keys, name):
    """The whole number that an event has under this name."""
    return next(
        stat.int64_value or stat.uint64_value for stat in event.stats if keys[stat.metadata_id] == name
    )


def core_seconds(threads):
    """How long all threads together were at each instruction, tasks that it handed out included.

        thread 1   calls a 0..10, and in it: hands out task 7 at 1, calls b 4..6
        thread 2   at task 7 2..9, and in it: calls b 5..6
        ->   a 8 + 6, b 2 + 1

    A task counts for the instruction that handed it out, or whose task did; one that none did, such as
    running the program, counts for nothing.

    Args:
        threads: List of lists of (start, end, what), of which two overlap only where one holds the other;
            `what` is the name of an instruction that is called, the number of a task, or a `HandingOut`. Each
            number is of one task.

    Returns:
        Dict from name to the sum over its calls and tasks.
    """
    seconds, origins = collections.Counter(), {}
    for spans in threads:
        for (start, end, what), holder in _with_holders(spans):
            if isinstance(what, HandingOut):
                origins[what.task] = holder
                continue
            seconds[what] += end - start
            if holder is not None:
                seconds[holder] -= end - start
    of_instructions = collections.Counter()
    for what, own in seconds.items():
        while isinstance(what, int):
            what = origins.get(what)
        if what is not None:
            of_instructions[what] += own
    return dict(of_instructions)


def _with_holders(spans):
    """Each span, and what the innermost around it is, or None: an instruction or task."""
    around = []  # (end, what), from the outermost to the innermost
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        start, end, what = span
        while around and around[-1][0] <= start:
            around.pop()
        yield span, around[-1][1] if around else None
        if not isinstance(what, HandingOut):
            around.append((end, what))
