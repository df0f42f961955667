"""Whether there is a checkpoint to read, asked before Keras is imported to read it."""

from pathlib import Path

from bert_packed.core.settings import InputError


def check_present(path):
    """Raise `InputError` where `--init_checkpoint` names nothing on this disk.

    Args:
        path: A folder, or a PREFIX of a TensorFlow checkpoint, which has a PREFIX.index; "" is none.
    """
    if path and not Path(path).exists() and not Path(f"{path}.index").is_file():
        raise InputError(
            "`init_checkpoint` must be a folder, or the prefix of a TensorFlow checkpoint, that exists. "
            f"Received: {path}."
        )
