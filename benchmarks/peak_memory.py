"""Peak memory of a job above its imports: of this process and of those that it starts, each at its peak.

Linux counts the peak of each program in /proc/PID/status as VmHWM. `ru_maxrss` looks like the same number,
but a process inherits it from the one that started it, so a small program looks as large as its parent.
"""

import os
import threading

PROCESSES = "/proc"
KIBIBYTE = 2**10  # the unit of both fields, whatever the file calls it
SECONDS_BETWEEN_LOOKS = 0.05
LOOKS_BETWEEN_SEARCHES = 10  # for processes that were started since


class MemoryWatch:
    """Watches the memory of this process and of those that it starts while a block runs.

        with MemoryWatch() as watch:
            pack(config)
        watch.largest_growth, watch.total_growth

    What is resident when the block begins, the imports, is the base, for the processes that are started too:
    they import the same. What a process takes in its last twentieth of a second may be missed.

    Attributes:
        largest_growth: Bytes that the process that grew most had above the base; None where the system
            does not say, which is everywhere but on Linux.
        total_growth: Sum over all processes, at least what they took together: their peaks need not coincide.
    """

    def __init__(self):
        self.largest_growth = self.total_growth = None
        self._base, self._peaks = None, {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_until_over, daemon=True)

    def __enter__(self):
        self._base = read_memory(os.getpid(), "VmRSS")
        if self._base is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception):
        if self._base is None:
            return
        self._is_over.set()
        self._thread.join()
        # The thread may have looked last before this process took most; the others have ended
        self._look([os.getpid()])
        growths = [max(0, peak - self._base) for peak in self._peaks.values()]
        self.largest_growth, self.total_growth = max(growths), sum(growths)

    def _look_until_over(self):
        looks, processes = 0, []
        while not self._is_over.wait(SECONDS_BETWEEN_LOOKS):
            # A search reads a file for every process of the machine: not at each look
            if looks % LOOKS_BETWEEN_SEARCHES == 0:
                processes = find_descendants(os.getpid())
            self._look(processes)
            looks += 1

    def _look(self, processes):
        for process in processes:
            peak = read_memory(process, "VmHWM")
            if peak is not None:
                self._peaks[process] = max(peak, self._peaks.get(process, 0))


def read_memory(process, field):
    """A memory field of a process in bytes, "VmRSS", resident, or "VmHWM", the most; None if unknown."""
    try:
        with open(f"{PROCESSES}/{process}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(lines[field].split()[0]) * KIBIBYTE if field in lines else None


def find_descendants(process):
    """The processes that a process has started, and those that they have: ascending list of int."""
    children = {}
    for name in os.listdir(PROCESSES):
        if name.isdecimal() and (parent := _read_parent(name)) is not None:
            children.setdefault(parent, []).append(int(name))
    found, left = [], [process]
    while left:
        started = children.get(left.pop(), [])
        found += started
        left += started
    return sorted(found)


def _read_parent(process):
    try:
        with open(f"{PROCESSES}/{process}/stat") as file:
            # the name in parentheses may hold anything: what follows the last one is regular
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return None
