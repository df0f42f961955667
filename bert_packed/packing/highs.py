"""HiGHS models that print nothing, and solves whose failure is an error."""

import contextlib
import os

import highspy

STANDARD_OUTPUT = 1  # the file descriptor: compiled code knows nothing of `sys.stdout`


def make_model(**options):
    """An empty HiGHS model with one thread, a fixed seed, no output, and options by HiGHS's names."""
    with _without_output():
        model = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, **options}.items():
        if model.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise ValueError(f"HiGHS must know its options. Received: {name}={value!r}.")
    return model


def solve(model, *ends):
    """Run a model of `make_model`; returns by which of the `HighsModelStatus` `ends` it ended.

    Raises:
        RuntimeError: HiGHS failed, or ended otherwise.
    """
    # A thread's first run fixes its number of HiGHS threads, and HiGHS refuses to run a model with another.
    # Resetting before gets ours past another program's, resetting after the other's past ours.
    model.resetGlobalScheduler(True)
    try:
        status = model.run()
    finally:
        model.resetGlobalScheduler(True)
    end = model.getModelStatus()
    if status == highspy.HighsStatus.kError or end not in ends:
        raise RuntimeError(f"HiGHS must solve a packing program. Received: {status}, {end}.")
    return end


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
