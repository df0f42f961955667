"""The vocabulary of a run: given, beside its checkpoint, or that of its packed records."""

from pathlib import Path

from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, is_file
from bert_packed.data.dynamic_masking import DynamicMasking
from bert_packed.records.inputs import folder_of
from bert_packed.records.manifests import read_manifest
from bert_packed.records.provenance import resolve_path
from bert_packed.runs import run_directory
from bert_packed.text.masking import masking_rules
from bert_packed.text.tokenization import load_vocab

VOCAB_FILE = "vocab.txt"
MOST_PADDING = 127  # rows that round a vocabulary up to a multiple of 128, as accelerators like it


def find_vocab(config):
    """The vocabulary file of a config: the one it names, else that of its checkpoint; raises `InputError`."""
    if config.vocab_file:
        return Path(config.vocab_file)
    start = Path(config.init_checkpoint)
    folders = [start] if config.init_checkpoint else []
    # A run writes vocab.txt beside its checkpoints, and Google beside a prefix. Beside another whole model
    # lies another model's
    if folders and (checkpoint.NAME.fullmatch(start.name) or Path(f"{start}.index").is_file()):
        folders.append(start.parent)
    for folder in folders:
        if (folder / VOCAB_FILE).is_file():
            return folder / VOCAB_FILE
    raise InputError(
        f"`vocab_file` must be given where no {VOCAB_FILE} is beside `init_checkpoint`. Received: nothing, "
        f"and init_checkpoint={config.init_checkpoint!r}."
    )


def describe_vocabulary(path, size, model_config, has_checkpoint):
    """A line about the vocabulary, of `size` WordPieces.

    Raises `InputError` where the model's embeddings, with `has_checkpoint`, were learned for a larger one.
    Rows that round a vocabulary up to a multiple of 8 are allowed.
    """
    line = f"vocabulary {path}, {size:,} WordPieces"
    num_more = model_config.vocab_size - size
    if not num_more:
        return line
    # A few rows more may be padding for accelerators; many are tokens of another vocabulary
    if has_checkpoint and (num_more > MOST_PADDING or model_config.vocab_size % 8):
        raise InputError(
            f"`vocab_file` must be the one that `init_checkpoint` was trained with, of its "
            f"vocab_size={model_config.vocab_size}. Received: {path}, of {size}."
        )
    return f"{line}; the model has {num_more:,} more rows, which no text uses"


def check_as_trained(config, vocab_path):
    """Check that a model used without training reads texts as in the run that trained it.

    Raises `InputError` where `do_lower_case` or the vocabulary differs from that run's `run.json`.
    """
    start = Path(config.init_checkpoint)
    path = (start.parent if checkpoint.NAME.fullmatch(start.name) else start) / run_directory.RUN_FILE
    if not path.is_file():
        return
    run = run_directory.read_run(path.parent)
    # Pre-training has no such flag: nothing to compare
    do_lower_case = run["flags"].get("do_lower_case", config.do_lower_case)
    if do_lower_case != config.do_lower_case:
        raise InputError(
            f"`do_lower_case` must be as in the training of `init_checkpoint`, {do_lower_case} by {path}. "
            f"Received: {config.do_lower_case}."
        )
    checksum = file_sha256(vocab_path)
    if run["data"].get("vocab_sha256", checksum) != checksum:
        raise InputError(
            f"`vocab_file` must be the one that `init_checkpoint` was trained with, by {path}. "
            f"Received: {vocab_path}, another one."
        )


def make_masking(config, train):
    """The dynamic masking of a run's packs, and the checksum of its vocabulary; (None, None) if static.

    Raises:
        InputError: the vocabulary is not found, no vocabulary, or another one than the records'.
    """
    if config.masking == "static":
        return None, None
    path = config.vocab_file or _vocab_of_records(train)
    vocabulary, checksum = load_vocab(path), file_sha256(path)
    # Ids of the records would mean other WordPieces, and random replacements would be none of theirs
    if train.vocabularies and checksum not in train.vocabularies:
        raise InputError(
            f"`vocab_file` must be the one that the records of `input_file` were made with, of SHA-256 "
            f"{train.vocabularies[0][:12]}... by their manifest.json. Received: {path}, of {checksum[:12]}..."
        )
    return DynamicMasking(vocabulary, masking_rules(config), config.random_seed), checksum


def _vocab_of_records(train):
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
        if not is_file(path):
            continue
        # One of another checksum may lie there by chance
        if not train.vocabularies or file_sha256(path) in train.vocabularies:
            return path
    raise InputError(
        f"`vocab_file` must be given with masking=dynamic where no {VOCAB_FILE} is beside the records of "
        f"`input_file` or what they were packed from. Received: nothing, and {', '.join(folders)}."
    )
