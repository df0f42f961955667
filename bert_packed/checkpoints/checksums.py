"""Whether a folder is still as it was written: checksums of its files, as `sha256sum --check` reads them.

b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c  model.safetensors
7d865e959b2466918c9863afca942d0fb89d7c9ac0c99bafc3749504ded97730  state.json
"""

import re
from pathlib import Path

from bert_packed.core import storage
from bert_packed.core.settings import InputError

CHECKSUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")


def write_checksums(folder):
    """Write down the checksums of all files of a folder, in the folder."""
    paths = sorted(Path(folder).iterdir())
    lines = [f"{storage.file_sha256(path)}  {path.name}\n" for path in paths]
    (Path(folder) / CHECKSUMS).write_text("".join(lines))


def check_checksums(folder, names, others=True):
    """Compare every byte of a folder's files with what was written.

    Args:
        folder: Where.
        names: Files that must be on the list.
        others: Whether the other files on the list are compared too.

    Returns:
        Whether there is a list.

    Raises:
        InputError: the list is damaged, or a file is missing or is not the one on the list.
    """
    path = Path(folder) / CHECKSUMS
    if not path.exists():
        return False
    # Every byte has an ASCII reading of its own here: a flipped bit must not be an error of decoding
    lines = path.read_text("latin-1").splitlines(keepends=True)
    found = [LINE.fullmatch(line) for line in lines]
    if None in found or not set(names) <= {match[2] for match in found}:
        raise InputError(f"{path} must list {', '.join(names)}. Received: {len(lines)} lines.")
    for match in found:
        if not others and match[2] not in names:
            continue
        try:
            received = storage.file_sha256(Path(folder) / match[2])
        except FileNotFoundError:
            received = "no such file"
        if received != match[1]:
            raise InputError(
                f"{Path(folder) / match[2]} must have the SHA-256 {match[1]} of {CHECKSUMS}. "
                f"Received: {received}."
            )
    return True
