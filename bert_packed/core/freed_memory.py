"""Settings of GNU's malloc by which freed memory stays with the process."""

import ctypes
import os
import platform

# Numbers of <malloc.h>, and what each is set to
LARGE_ARRAYS = {
    -3: 2**25,  # M_MMAP_THRESHOLD, bytes, the most it takes: smaller blocks come from the heap
    -1: -1,  # M_TRIM_THRESHOLD: the heap never shrinks; no number of bytes it takes is above 2 GiB
}
# Only together: worker threads take large blocks from the system whatever the threshold is, unless all
# threads share the one heap that can grow
ALL_BLOCKS = {
    -4: 0,  # M_MMAP_MAX: no block is taken from the system by itself, to be given back when it is freed
    -1: -1,
    -8: 1,  # M_ARENA_MAX: one heap
}
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")  # environment variables by which a user tunes the same


def keep_freed_memory(settings=LARGE_ARRAYS):
    """Let the C library keep what this process frees, for what it allocates next.

    Blocks of some megabytes otherwise come from the system each time, page by page and each page filled with
    zeros: 492,000 pages in packing 480 MB of records, now 24,000, and a fifth of a step of bert-mini under
    JAX. The process holds as much as its largest step did, under JAX up to a third more.

    `settings` are `ALL_BLOCKS` for XLA, before JAX or TensorFlow is imported. Returns False, and changes
    nothing, with another C library than GNU's, or where the environment has settings of it.
    """
    if not is_ours_to_set():
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(number, value) for number, value in settings.items())


def is_ours_to_set():
    """True if the C library is GNU's, and the environment has no settings for its memory."""
    return platform.libc_ver()[0] == "glibc" and not any(
        name.startswith(_OWN_SETTINGS) for name in os.environ
    )
