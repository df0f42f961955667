"""A clock for tests of what measures time: it moves when it is told to, and by nothing else."""


class Clock:
    """A replacement for the module `time` in a module under test.

    Attributes:
        now: Seconds.
    """

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        """The time, as from `time.perf_counter`."""
        return self.now

    def sleep(self, seconds):
        """Move by these seconds, as `time.sleep`."""
        self.now += seconds

    def taking(self, seconds, result=None):
        """A function of any arguments that takes these seconds, one after the other, and returns `result`."""
        left = list(seconds)

        def function(*_, **__):
            self.now += left.pop(0)
            return result

        return function
