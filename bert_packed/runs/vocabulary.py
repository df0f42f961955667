"""Which vocabulary a fine-tuning reads texts with: its own, or the one its checkpoint was trained with."""

from pathlib import Path

from bert_packed.checkpoints import checkpoint
from bert_packed.core.settings import InputError
from bert_packed.core.storage import file_sha256, read_json
from bert_packed.runs import run_directory
from bert_packed.text import tokenization

VOCAB_FILE = "vocab.txt"
MOST_PADDING = 127  # rows that round a vocabulary up to a multiple of 128, as accelerators like it


def find_vocab(config):
    """The vocabulary file of a config: its own, or the one of its checkpoint; raises `InputError`.

    That lies in `init_checkpoint`. It lies beside it only where that is one of a run's checkpoints or the
    prefix of a TensorFlow checkpoint: what lies beside a whole model is of another one.
    """
    if config.vocab_file:
        return Path(config.vocab_file)
    start = Path(config.init_checkpoint)
    folders = [start] if config.init_checkpoint else []
    if folders and (checkpoint.NAME.fullmatch(start.name) or Path(f"{start}.index").is_file()):
        folders.append(start.parent)
    for folder in folders:
        if (folder / VOCAB_FILE).is_file():
            return folder / VOCAB_FILE
    raise InputError(
        f"`vocab_file` must be given where no {VOCAB_FILE} is beside `init_checkpoint`. Received: nothing, "
        f"and init_checkpoint={config.init_checkpoint!r}."
    )


def load_tokenizer(config):
    """The vocabulary's path, the vocabulary and the tokenizer of a config; raises `InputError`."""
    path = find_vocab(config)
    vocabulary = tokenization.load_vocab(path)
    return path, vocabulary, tokenization.make_tokenizer(vocabulary, config.do_lower_case)


def describe_vocabulary(path, size, model_config, has_checkpoint):
    """Which vocabulary is used, in a line.

    Args:
        path: Vocabulary.
        size: Its WordPieces.
        model_config: `ModelConfig`.
        has_checkpoint: Whether the model's embeddings were learned for some vocabulary already.

    Raises:
        InputError: they were learned for a larger one. A model whose rows were rounded up to a multiple of 8
            passes, and so does one that starts at random.
    """
    line = f"vocabulary {path}, {size:,} WordPieces"
    num_more = model_config.vocab_size - size
    if not num_more:
        return line
    if has_checkpoint and (num_more > MOST_PADDING or model_config.vocab_size % 8):
        raise InputError(
            f"`vocab_file` must be the one that `init_checkpoint` was trained with, of its "
            f"vocab_size={model_config.vocab_size}. Received: {path}, of {size}."
        )
    return f"{line}; the model has {num_more:,} more rows, which no text uses"


def check_vocabulary(config, path, size, model_config, tell):
    """Tell which vocabulary is used, once it is found to be the model's.

    Args:
        config: `FinetuneConfig`.
        path, size: Of the vocabulary.
        model_config: `ModelConfig`.
        tell: Called with a line.

    Raises:
        InputError: as `describe_vocabulary` and, without training, `check_as_trained`.
    """
    tell(describe_vocabulary(path, size, model_config, bool(config.init_checkpoint)))
    if not config.do_train:
        check_as_trained(config, path)


def check_as_trained(config, vocab_path):
    """Check that a model which is used without training reads texts as it did in the run that trained it.

    Only runs of ours tell, by their `run.json`.

    Raises:
        InputError: `do_lower_case` or the vocabulary differs.
    """
    start = Path(config.init_checkpoint)
    path = (start.parent if checkpoint.NAME.fullmatch(start.name) else start) / run_directory.RUN_FILE
    if not path.is_file():
        return
    run = read_json(path)
    do_lower_case = run.get("flags", {}).get("do_lower_case", config.do_lower_case)
    if do_lower_case != config.do_lower_case:
        raise InputError(
            f"`do_lower_case` must be as in the training of `init_checkpoint`, {do_lower_case} by {path}. "
            f"Received: {config.do_lower_case}."
        )
    checksum = file_sha256(vocab_path)
    if run.get("data", {}).get("vocab_sha256", checksum) != checksum:
        raise InputError(
            f"`vocab_file` must be the one that `init_checkpoint` was trained with, by {path}. "
            f"Received: {vocab_path}, another one."
        )
