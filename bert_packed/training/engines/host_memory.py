"""Freed memory stays with the process, where a step would otherwise ask the system for it again each time."""

import ctypes
import os
import platform

# Numbers of <malloc.h>, and what each is set to. Only together: worker threads take large blocks
# from the system whatever the threshold is, unless all threads share the one heap that can grow
_SETTINGS = {
    -4: 0,  # M_MMAP_MAX: no block is taken from the system by itself, to be given back when it is freed
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD, bytes: the heap does not shrink
    -8: 1,  # M_ARENA_MAX: one heap
}
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")  # environment variables by which a user tunes the same


def keep_freed_memory():
    """Let the C library keep what the program frees, from now on; call it before JAX is imported.

    JAX on a CPU takes the temporary memory of every step anew. Blocks of that size come from the system, page
    by page and each page filled with zeros: 300,000 pages for a step of bert-mini on 8 packs of 512, a
    quarter of its time. With the heap kept they come once. The process then holds what its largest step held,
    and up to a third more, where blocks of other sizes left gaps.

    TensorFlow keeps such memory by itself.

    Returns:
        Whether it is so now: not with another C library than GNU's, nor where the environment has settings of
        its own (`GLIBC_TUNABLES`, `MALLOC_...`).
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(_OWN_SETTINGS) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(number, value) for number, value in _SETTINGS.items())
