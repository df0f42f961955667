"""HiGHS models that print nothing."""

import contextlib
import os

import highspy

STANDARD_OUTPUT = 1  # the file descriptor: compiled code knows nothing of `sys.stdout`


def make_model(**options):
    """An empty HiGHS model with one thread, a fixed seed and no output.

    Args:
        options: HiGHS's own, by name.
    """
    with _without_output():
        model = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, **options}.items():
        model.setOptionValue(name, value)
    return model


@contextlib.contextmanager
def _without_output():
    """Drop what compiled code prints: HiGHS 1.16 greets with two lines before an option could silence it."""
    try:
        standard_output = os.dup(STANDARD_OUTPUT)
    except OSError:  # closed: there is nothing to print to
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), STANDARD_OUTPUT)
        yield
    finally:
        os.dup2(standard_output, STANDARD_OUTPUT)
        os.close(standard_output)
