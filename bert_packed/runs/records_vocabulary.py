"""The vocabulary that packed records were made with: who masks them anew must know its WordPieces."""

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.data.dynamic_masking import DynamicMasking
from bert_packed.records.inputs import folder_of
from bert_packed.records.manifests import read_manifest
from bert_packed.records.provenance import resolve_path
from bert_packed.runs.vocabulary import VOCAB_FILE
from bert_packed.text.masking import masking_rules
from bert_packed.text.tokenization import load_vocab


def make_masking(config, train):
    """What draws the masks of a run's packs, and the checksum of the vocabulary by which it does.

    Args:
        config: `TrainConfig`.
        train: `PackedFiles` that it trains on.

    Returns:
        `DynamicMasking` and str; (None, None) where the masks are the records'.

    Raises:
        InputError: the vocabulary is not found, no vocabulary, or another one than the records'.
    """
    if config.masking == "static":
        return None, None
    path = config.vocab_file or _find_vocab(train)
    vocabulary, checksum = load_vocab(path), storage.file_sha256(path)
    if train.vocabularies and checksum not in train.vocabularies:
        raise InputError(
            f"`vocab_file` must be the one that the records of `input_file` were made with, of SHA-256 "
            f"{train.vocabularies[0][:12]}... by their manifest.json. Received: {path}, of {checksum[:12]}..."
        )
    return DynamicMasking(vocabulary, masking_rules(config), config.random_seed), checksum


def _find_vocab(train):
    """The vocab.txt beside the records, or beside the files that they were packed from."""
    folders = {folder_of(path): None for path in train.files}  # a dict keeps their order
    for folder in list(folders):
        manifest = read_manifest(folder, any_json=True)
        inputs = manifest.get("inputs") if isinstance(manifest, dict) else None
        for entry in inputs if isinstance(inputs, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                folders[folder_of(resolve_path(entry, folder))] = None
    for folder in folders:
        path = f"{folder}/{VOCAB_FILE}"
        if not storage.is_file(path):
            continue
        # One of another checksum may lie there by chance
        if not train.vocabularies or storage.file_sha256(path) in train.vocabularies:
            return path
    raise InputError(
        f"`vocab_file` must be given with masking=dynamic where no {VOCAB_FILE} is beside the records of "
        f"`input_file` or what they were packed from. Received: nothing, and {', '.join(folders)}."
    )
