"""A peer computes in a process of its own, with the memory habits that it is given."""

import importlib
import os
import platform
import resource
import subprocess
import sys
import time
from concurrent import futures

import numpy as np
import pytest

from benchmarks.peer_process import PeerProcess, torch_peers
from bert_packed.core.settings import InputError

NUM_BYTES = 48 << 20  # more than the C library keeps by itself, 32 MiB


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

    def sleep(self, seconds):
        time.sleep(seconds)

    def imported(self):
        """Which of the backends' packages the process has imported, after torch's reference."""
        importlib.import_module("benchmarks.torch_reference")
        return sorted({"keras", "tensorflow", "jax"} & set(sys.modules))


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


def test_an_exception_in_the_block_does_not_wait_for_what_is_computed():
    with futures.ThreadPoolExecutor(1) as thread:
        with pytest.raises(KeyError), PeerProcess(Peer, "peer") as peer:
            sleeps = thread.submit(peer.call, "sleep", 60)
            raise KeyError
        assert isinstance(sleeps.exception(), OSError)  # ended before it could return


PROGRAM = """
import sys
sys.path[:0] = TESTS
from test_peer_process import Peer
from benchmarks.peer_process import PeerProcess, torch_peers

if __name__ == "__main__":
    for keeps_memory in (False, True):
        with PeerProcess(Peer, "peer", keeps_memory=keeps_memory) as peer:
            print(peer.call("least_faults"), peer.call("imported"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_kept_where_told_and_no_keras_is_there(tmp_path):
    """Processes begun as a user's are, from a program that is none of pytest's."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("TESTS", repr([os.path.dirname(__file__), os.path.abspath(".")])))
    tuned = "GLIBC_TUNABLES", "MALLOC_"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(tuned)}
    command = [sys.executable, str(program)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    (given_back, *_), (kept, *_) = lines = [line.split(maxsplit=1) for line in found.splitlines()]
    assert [imported for _, imported in lines] == ["[]", "[]"]
    # NumPy asks for large pages where the system gives them: 512 times fewer
    assert int(given_back) >= NUM_BYTES / resource.getpagesize() / 512 and int(kept) < 10


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_where_the_environment_tunes_memory_there_is_one_process(monkeypatch, name):
    for tuned in list(os.environ):
        if tuned.startswith(("MALLOC_", "GLIBC_TUNABLES")):
            monkeypatch.delenv(tuned)
    both = {"transformers": False, "transformers, memory kept": True}
    assert torch_peers() == (both if platform.libc_ver()[0] == "glibc" else {"transformers": False})
    monkeypatch.setenv(name, "1")
    assert torch_peers() == {"transformers": False}
