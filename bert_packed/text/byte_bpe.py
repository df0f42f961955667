"""Byte-level BPE in a `tokenizer.json`, trained here or elsewhere."""

import dataclasses
import json

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.text import tokenization

END_OF_TEXT = "<|endoftext|>"
# Tokens that open and close a document; the first pair that a vocabulary has counts
BOUNDARIES = (
    (END_OF_TEXT, END_OF_TEXT),  # GPT-2, GPT-NeoX, and so Mamba
    ("<|begin_of_text|>", "<|end_of_text|>"),  # Llama 3
    ("<s>", "</s>"),  # RoBERTa, Llama 2
    (tokenization.CLS, tokenization.SEP),  # BERT
)
MIN_VOCAB_SIZE = 257  # every byte, and END_OF_TEXT
MIN_FREQUENCY = 2  # of a merged pair: one that occurs once shortens nothing else


@dataclasses.dataclass(frozen=True)
class DocumentTokenizer:
    """A tokenizer, with the ids of the tokens that open and close a document, which may be equal."""

    tokenizer: Tokenizer
    start_id: int
    end_id: int
    vocab_size: int


def load(path):
    """`DocumentTokenizer` of a `tokenizer.json`, ours or another's.

    Raises:
        InputError: the file is no tokenizer, or has none of `BOUNDARIES`.
        OSError: it cannot be read.
    """
    try:
        content = storage.read_text(path)
        json.loads(content)  # whose message names the place
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # `tokenizers` raises Exception itself
        if isinstance(error, OSError):
            raise
        raise InputError(
            f"`vocab_file` must be a tokenizer.json, as `tokenizers` writes it. Received: {path}: {error}."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A special token in the text is text: a page about <|endoftext|> does not end at the word
    tokenizer.encode_special_tokens = True
    ids = tokenizer.get_vocab()
    for start, end in BOUNDARIES:
        if start in ids and end in ids:
            return DocumentTokenizer(tokenizer, ids[start], ids[end], max(ids.values()) + 1)
    wanted = "; ".join(" and ".join(dict.fromkeys(pair)) for pair in BOUNDARIES)
    raise InputError(
        f"`vocab_file` must hold tokens that open and close a document: {wanted}. "
        f"Received: {path}, with none."
    )


def train(texts, vocab_size):
    """Train byte-level BPE. Equal text gives an equal vocabulary.

    Args:
        texts: Iterable of lists of texts.
        vocab_size: Number of tokens; a small text may give fewer.

    Returns:
        `tokenizers.Tokenizer`: id 0 is `END_OF_TEXT`, then all bytes, then merges, the most frequent first.

    Raises:
        InputError: `vocab_size` is below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise InputError(
            f"`vocab_size` must be at least {MIN_VOCAB_SIZE}, for every byte and {END_OF_TEXT}. "
            f"Received: {vocab_size}."
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),  # so that no text has an unknown byte
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer, path):
    """Write a tokenizer for `load` and for Hugging Face's `PreTrainedTokenizerFast`."""
    with storage.open_file(path, "wb") as file:
        file.write(tokenizer.to_str(pretty=True).encode())
