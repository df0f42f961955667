"""What the classes of a fine-tuned model are called: `labels.txt` of a run, `id2label` of Hugging Face."""

from pathlib import Path

from bert_packed.checkpoints import checkpoint
from bert_packed.checkpoints.pretrained_files import HUGGING_FACE_CONFIG
from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json, read_text

LABELS_FILE = "labels.txt"


def read_labels(path):
    """Names of classes, one a line, the first of class 0: tuple of str.

    Raises:
        InputError: the file is no UTF-8, or holds no name, an empty one, or one twice.
    """
    return _checked(path, tuple(line.strip() for line in read_text(path).rstrip("\n").split("\n")))


def stored_labels(init_checkpoint):
    """Names of the classes that a checkpoint tells apart; () where nothing says so.

    Args:
        init_checkpoint: As in `vocabulary.find_vocab`: a run's folder, a checkpoint in it, or a folder of
            Hugging Face.

    Raises:
        InputError: as `read_labels`.
    """
    start = Path(init_checkpoint)
    for folder in (start, *([start.parent] if checkpoint.NAME.fullmatch(start.name) else [])):
        if (folder / LABELS_FILE).is_file():
            return read_labels(folder / LABELS_FILE)
    path = start / HUGGING_FACE_CONFIG
    if not path.is_file():
        return ()
    try:
        by_number = read_json(path).get("id2label") or {}
        return _checked(path, tuple(by_number[str(number)] for number in range(len(by_number))))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path} must hold id2label from 0 on. Received: {error!r}.") from error


def _checked(path, names):
    if not names or not all(names) or len({*names}) < len(names):
        raise InputError(
            f"{path} must name each label once. Received: {', '.join(map(repr, names)) or 'none'}."
        )
    return names
