"""Import of TensorFlow without its start-up lines."""

import importlib
import os
import tempfile


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
