"""A peer computes in a process of its own, with the memory habits that it is given."""

import os
import platform
import resource

import numpy as np
import pytest

from bert_packed.reports.peer_process import PeerProcess
from data_gen.cli.settings import InputError

NUM_BYTES = 128 << 20  # more than the C library keeps by itself


class Peer:
    """What is asked of it, by name."""

    def __init__(self, name):
        if name == "refused":
            raise InputError("`name` must be another.")
        self._name, self._calls = name, 0

    def tell(self, what, times=1):
        self._calls += 1
        return f"{self._name} {self._calls}: {what * times}", os.getpid()

    def least_faults(self):
        """Pages that the system brought in for an array that was freed and is taken again."""
        faults = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            np.ones(NUM_BYTES, np.uint8)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return min(faults)

    def end(self):
        os._exit(3)


def test_an_object_stays_in_another_process_until_the_block_ends():
    with PeerProcess(Peer, "peer") as peer:
        said, process = peer.call("tell", "x")
        assert said == "peer 1: x" and process != os.getpid()
        assert peer.call("tell", "x", times=2) == ("peer 2: xx", process)
        with pytest.raises(AttributeError, match="shout"):
            peer.call("shout")
        assert peer.call("tell", "y") == ("peer 3: y", process)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_what_goes_wrong_there_is_raised_here():
    with pytest.raises(InputError, match="`name` must be another"), PeerProcess(Peer, "refused"):
        pass
    with pytest.raises(OSError, match="ended without a word"), PeerProcess(Peer, "peer") as peer:
        peer.call("end")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_kept_where_told(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            monkeypatch.delenv(name)
    pages = NUM_BYTES / resource.getpagesize()
    for keeps_memory in (False, True):
        with PeerProcess(Peer, "peer", keeps_memory=keeps_memory) as peer:
            faults = peer.call("least_faults")
        # NumPy asks for large pages where the system gives them: 512 times fewer
        assert faults < 10 if keeps_memory else faults >= pages / 512, (keeps_memory, faults)
