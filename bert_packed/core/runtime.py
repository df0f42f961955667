"""This process: versions of packages and code, quiet imports, kept memory, and what is repeated meanwhile."""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import os
import platform
import tempfile
import threading
from pathlib import Path

# The bytes of records depend on these. Manifests record their hash; other code does not continue a run
RECORD_CODE = (
    "data_gen",
    *(f"bert_packed/{name}" for name in ("core", "packing", "records", "assembly", "text")),
)
PACKAGES = ("bert_packed", "numpy", "scipy", "highspy", "tensorflow", "tokenizers", "sentencex")


def versions(packages=PACKAGES):
    """Dict from package, and "python", to its version; "unknown" where one is not installed as a package."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def code_sha256():
    """Hexadecimal SHA-256 of the code that records depend on; it changes between releases as well."""
    digest = hashlib.sha256()
    top = Path(__file__).resolve().parents[2]
    for path in sorted(path for folder in RECORD_CODE for path in (top / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(top)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def import_quietly(name):
    """Import a module; the output of its compiled code is shown only if the import fails.

    TensorFlow 2.21 prints six lines on standard error before it looks at `TF_CPP_MIN_LOG_LEVEL`, and they
    would bury the one line of a user's mistake.
    """
    with tempfile.TemporaryFile() as chatter:
        standard_error = os.dup(2)  # the file descriptor: compiled code knows nothing of `sys.stderr`
        os.dup2(chatter.fileno(), 2)
        try:
            return importlib.import_module(name)
        except BaseException:
            chatter.seek(0)
            os.write(standard_error, chatter.read())
            raise
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)


# Numbers of <malloc.h>, and what each is set to
LARGE_ARRAYS = {
    -3: 2**25,  # M_MMAP_THRESHOLD, bytes, the most it takes: smaller blocks come from the heap
    -1: -1,  # M_TRIM_THRESHOLD: the heap never shrinks; no number of bytes it takes is above 2 GiB
}
# They work only together: worker threads take large blocks from the system whatever the threshold is, unless
# all threads share the one heap that can grow
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


@contextlib.contextmanager
def repeating(call, seconds):
    """Call a function every so many seconds, in a thread, while the body runs."""
    is_over = threading.Event()

    def repeat():
        while not is_over.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
