"""A tiny encoder on disk with its vocabulary, and texts for it."""

from tiny import CONFIG, make_engine

from bert_packed.checkpoints import checkpoint
from bert_packed.text.tokenization import SPECIAL_TOKENS

WORDS = [f"w{number}" for number in range(26)]
TEXTS = [" ".join(WORDS[start : start + length]) for start, length in enumerate([3, 0, 9, 1, 22, 5, 2, 8, 4])]


def write_encoder(folder):
    """Write weights, `bert_config.json` and `vocab.txt` into `folder`; returns it."""
    checkpoint.save_weights(folder, make_engine().weights(), CONFIG)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return folder
