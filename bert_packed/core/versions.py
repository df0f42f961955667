"""Versions of packages and of the code: recorded in manifests, and a reason not to continue another run."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path

# The bytes of the records depend on these
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
