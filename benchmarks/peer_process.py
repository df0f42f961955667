"""What a peer computes, in a process of its own: as its users run it, whatever this process has set.

A command of ours keeps freed memory (`bert_packed.core.freed_memory`), by which torch in the same process
would be faster than a user of it has it. How much that is, a second process with the same setting tells.
"""

import contextlib
import os
import signal

from bert_packed.core.freed_memory import ALL_BLOCKS, is_ours_to_set
from data_gen.jobs.runners import start_workers, telling_lost_workers

# Names under which benchmarks have transformers
AS_IT_IS, MEMORY_KEPT = "transformers", "transformers, memory kept"
_OBJECT = []  # of the worker


def torch_peers():
    """The processes of a benchmark: dict from a name to `PeerProcess`'s `keeps_memory`.

    The second is missing where the C library is another one than GNU's, or tuned by the environment: then
    torch has, in the first, what the environment says.
    """
    return {AS_IT_IS: False, **({MEMORY_KEPT: True} if is_ours_to_set() else {})}


class PeerProcess:
    """An object in a process of its own, whose methods are called from here.

        with PeerProcess(TorchEncoder, folder, 512, 8) as peer:
            peer.call("encode", texts, "longest")   # TorchEncoder(folder, 512, 8).encode(texts, "longest")

    The process ends with the block, at once where that ends by an exception, or with this process. An
    exception there is raised here.

    Args:
        make: Function, or class, that makes the object; called with `arguments`. Like these, what methods
            take and return can be pickled.
        keeps_memory: Whether the C library keeps there what is freed, as in our commands.
    """

    def __init__(self, make, *arguments, keeps_memory=False):
        self._pool = start_workers(1, freed_memory=ALL_BLOCKS if keeps_memory else None)
        self._makes = make, arguments

    def __enter__(self):
        makes, self._makes = self._makes, None
        try:
            self._process = self._run(os.getpid)
            self._run(_make, *makes)
        except BaseException:
            self._pool.shutdown()
            raise
        return self

    def __exit__(self, kind, *_):
        if kind:  # do not wait for what it computes
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGTERM)
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
