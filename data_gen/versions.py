"""Which versions made a data set: recorded in manifests, and a reason not to continue another's work."""

import importlib.metadata
import platform

# What the bytes of the records depend on.
PACKAGES = ("bert_packed", "numpy", "scipy", "highspy", "tensorflow", "tokenizers", "sentencex")


def versions():
    """Dict from package, and "python", to its version; "unknown" where one is not installed as a package."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
