"""Make tests and the processes that they start interruptible, however the suite itself was started.

Batch systems and `command &` in a script start a process with SIGINT ignored, and every child inherits that.
"""

import contextlib
import signal


@contextlib.contextmanager
def interruptible(is_so=True):
    """SIGINT raises `KeyboardInterrupt` in the body, and kills a process started there that does not mind it.

    Args:
        is_so: False to ignore it, as a batch system starts a command.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler if is_so else signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
