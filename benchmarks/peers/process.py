"""Objects in another process: a peer as its users run it, whatever this process has set.

A command of ours keeps freed memory (`bert_packed.core.runtime`), which would make torch in the same
process faster than its users have it. A second process with the same setting shows by how much.
"""

import contextlib
import os
import signal

from bert_packed.core.runtime import ALL_BLOCKS, is_ours_to_set
from data_gen.jobs.runners import start_workers, telling_lost_workers

# Tables have these names of transformers
AS_IT_IS, MEMORY_KEPT = "transformers", "transformers, memory kept"
_OBJECT = []  # of the worker


def torch_processes():
    """The processes that a benchmark has transformers in: dict from name to `PeerProcess`'s `keeps_memory`.

    The second is missing where the C library is another one than GNU's, or the environment tunes it: then
    that holds for the first.
    """
    return {AS_IT_IS: False, **({MEMORY_KEPT: True} if is_ours_to_set() else {})}


class PeerProcess:
    """An object in another process, whose methods are called from here.

        with PeerProcess(Encoder, folder, 512, 8) as peer:
            peer.call("encode", texts, "longest")   # Encoder(folder, 512, 8).encode(texts, "longest")

    The process ends with the block, at once where that ends by an exception, or with this process. An
    exception there is raised here. All that goes between can be pickled; `keeps_memory` is as in
    `torch_processes`. A call that takes longer than `seconds` raises `TimeoutError`.
    """

    def __init__(self, make, *arguments, keeps_memory=False, seconds=None):
        self._pool = start_workers(1, freed_memory=ALL_BLOCKS if keeps_memory else None)
        self._makes = make, arguments
        self._seconds = seconds

    def __enter__(self):
        makes, self._makes = self._makes, None
        self._process = None
        try:
            self._process = self._run(os.getpid)
            self._run(_make, *makes, seconds=self._seconds)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind, *_):
        if kind and self._process:  # an exception or Ctrl-C: do not wait for what it computes
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGTERM)
        self._pool.shutdown()

    def call(self, method, *arguments, **keywords):
        """Call a method of the object by its name; returns its result."""
        return self._run(_call, method, arguments, keywords, seconds=self._seconds)

    def _run(self, *work, seconds=None):
        with telling_lost_workers():
            return self._pool.submit(*work).result(seconds)


def _make(make, arguments):
    _OBJECT[:] = [make(*arguments)]


def _call(method, arguments, keywords):
    return getattr(_OBJECT[0], method)(*arguments, **keywords)
