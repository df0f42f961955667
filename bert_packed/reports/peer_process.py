"""What a peer computes, in a process of its own: as its users run it, whatever this process has set.

A command of ours keeps freed memory (`data_gen.jobs.freed_memory`), by which torch in the same process would
be faster than a user of it has it. How much that is, a second process with the same setting tells.
"""

from data_gen.jobs.freed_memory import ALL_BLOCKS
from data_gen.jobs.workers import start_workers, telling_lost_workers

# The names under which benchmarks have transformers, and whether the C library keeps memory there
PEERS = {"transformers": False, "transformers, memory kept": True}
_OBJECT = []  # of the worker


class PeerProcess:
    """An object in a process of its own, whose methods are called from here.

        with PeerProcess(TorchEncoder, folder, 512, 8) as peer:
            peer.call("encode", texts, "longest")   # TorchEncoder(folder, 512, 8).encode(texts, "longest")

    The process ends with the block, or with this process. An exception there is raised here.

    Args:
        make: Function, or class, that makes the object; called with `arguments`. Like these, what methods
            take and return can be pickled.
        keeps_memory: Whether the C library keeps there what is freed, as in our commands.
    """

    def __init__(self, make, *arguments, keeps_memory=False):
        self._pool = start_workers(1, freed_memory=ALL_BLOCKS if keeps_memory else None)
        self._makes = make, arguments

    def __enter__(self):
        try:
            self._run(_make, *self._makes)
        except BaseException:
            self._pool.shutdown()
            raise
        return self

    def __exit__(self, *_):
        self._pool.shutdown()

    def call(self, method, *arguments, **keywords):
        """What the object's method of this name returns."""
        return self._run(_call, method, arguments, keywords)

    def _run(self, *work):
        with telling_lost_workers():
            return self._pool.submit(*work).result()


def _make(make, arguments):
    _OBJECT[:] = [make(*arguments)]


def _call(method, arguments, keywords):
    return getattr(_OBJECT[0], method)(*arguments, **keywords)
