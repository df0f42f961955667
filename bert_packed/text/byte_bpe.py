"""Byte-level BPE in a `tokenizer.json`, trained here or elsewhere."""

import dataclasses
import json

import numpy as np
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as TrimOffsets
from tokenizers.processors import Sequence, TemplateProcessing
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
# Special tokens of encoders: opening, closing, mask, padding; the first set that a vocabulary has counts
ENCODER_TOKENS = (
    (tokenization.CLS, tokenization.SEP, tokenization.MASK, tokenization.PAD),  # ModernBERT
    ("<s>", "</s>", "<mask>", "<pad>"),  # RoBERTa
)
# A vocabulary that is trained here begins with these; as everywhere, id 0 is padding
TRAINED_TOKENS = (tokenization.PAD, tokenization.CLS, tokenization.SEP, tokenization.MASK)
LINE_END = "Ċ"  # bytes that are no printable characters have others in their place: this is "\n"
WHITE_SPACE = ("Ġ", LINE_END, "ĉ", "č", "ċ", "Č", *" \n\t\r\v\f")  # added tokens hold these themselves
MIN_FREQUENCY = 2  # merging a pair that occurs once shortens nothing else


@dataclasses.dataclass(frozen=True)
class DocumentTokenizer:
    """A tokenizer, with the ids of the tokens that open and close a document, which may be equal."""

    tokenizer: Tokenizer
    start_id: int
    end_id: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class EncoderVocabulary:
    """Tokens of bytes by id: what making and masking sequences reads of a vocabulary.

        token              [CLS]  The   Ġcat  s   ,   Ċ   At
        is_continuation      1     1     0    1   1   0   1      no white space at its beginning
        ends_line            0     0     0    0   0   1   0      a line end within

    So a word is white space and what follows it: "," is of the word before it, as in fairseq's RoBERTa. The
    first token of a sequence opens a word in any case.
    """

    cls_id: int
    sep_id: int
    mask_id: int
    is_continuation: np.ndarray  # bool [V]
    ends_line: np.ndarray  # bool [V]
    ordinary_ids: np.ndarray  # int32, ascending: ids of tokens that are not special

    def __len__(self):
        """V: the largest id and 1; some ids below may be of no token."""
        return len(self.is_continuation)


def load(path, argument="vocab_file"):
    """`DocumentTokenizer` of a `tokenizer.json`, ours or another's; `argument` names the flag in messages."""
    try:
        content = storage.read_text(path)
        json.loads(content)  # whose message names the place
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # `tokenizers` raises Exception itself
        if isinstance(error, OSError):
            raise
        raise InputError(
            f"`{argument}` must be a tokenizer.json, as `tokenizers` writes it. Received: {path}: {error}."
        ) from error
    if getattr(tokenizer.model, "dropout", None):
        raise InputError(
            f"`{argument}` must have no dropout: the tokens of a text would differ from call to call. "
            f"Received: {path}, with dropout={tokenizer.model.dropout:.3g}."
        )
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
        f"`{argument}` must hold tokens that open and close a document: {wanted}. "
        f"Received: {path}, with none."
    )


def load_encoder_vocabulary(path):
    """`EncoderVocabulary` of a `tokenizer.json`, with the first set of `ENCODER_TOKENS` that it holds."""
    tokenizer, found = _load_encoder(path)
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special} | {*found}
    is_continuation, ends_line = np.ones(max(ids.values()) + 1, bool), np.zeros(max(ids.values()) + 1, bool)
    for token, index in ids.items():
        is_continuation[index] = not token.startswith(WHITE_SPACE)
        ends_line[index] = LINE_END in token or "\n" in token
    ordinary = np.array(sorted({*ids.values()} - special), np.int32)
    return EncoderVocabulary(*found[:3], is_continuation, ends_line, ordinary)


def load_byte_tokenizer(path):
    """`tokenization.TextTokenizer` of a `tokenizer.json`; raises as `load_encoder_vocabulary`.

    In the place of a word without a token, which a normalizer removed, is the mask: tokens of bytes need no
    [UNK].
    """
    tokenizer, (cls_id, sep_id, mask_id, _) = _load_encoder(path)
    # One that trims offsets may take a word's first letter for the space that its tokenizer added
    tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    size = max(tokenizer.get_vocab().values()) + 1
    mask = tokenizer.id_to_token(mask_id)
    return tokenization.TextTokenizer(tokenizer, cls_id, sep_id, mask_id, mask, size)


def _load_encoder(path):
    """The tokenizer of bytes, and the ids of the first set of `ENCODER_TOKENS` that it holds."""
    tokenizer = load(path).tokenizer
    if not isinstance(tokenizer.model, BPE) or not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise InputError(
            "`vocab_file` must be byte-level BPE where a tokenizer.json is read for masked tokens. "
            f"Received: {path}, {type(tokenizer.model).__name__}, whose decoder is "
            f"{type(tokenizer.decoder).__name__}."
        )
    found = find_encoder_tokens(tokenizer)
    if not found:
        ids = tokenizer.get_vocab().keys()
        nearest = min((sorted({*tokens} - ids) for tokens in ENCODER_TOKENS), key=len)
        raise InputError(
            f"`vocab_file` must hold {' or '.join(', '.join(tokens) for tokens in ENCODER_TOKENS)}, to mask "
            f"tokens. Received: {path}, without {', '.join(nearest)}."
        )
    return tokenizer, found


def find_encoder_tokens(tokenizer):
    """Ids of the first set of `ENCODER_TOKENS` that a tokenizer holds, in their order; None without any."""
    for tokens in ENCODER_TOKENS:
        ids = [tokenizer.token_to_id(token) for token in tokens]
        if None not in ids:
            return ids
    return None


def split_lines(ids, ends_line):
    """Cut the list of ids of a text after each token that ends a line; `ends_line` is bool `[V]`.

    "a b\\nc", of ids 7 8 5 9   ->   [7 8 5] [9]
    """
    first = 0
    for end in (np.flatnonzero(ends_line[ids]) + 1).tolist():
        yield ids[first:end]
        first = end
    if first < len(ids):
        yield ids[first:]


def train(texts, vocab_size, is_encoder=False):
    """Train byte-level BPE, for an encoder with `TRAINED_TOKENS`, else with `END_OF_TEXT`.

    Equal text gives an equal vocabulary: special tokens, all bytes, then merges; a small one may give fewer.
    """
    special = TRAINED_TOKENS if is_encoder else (END_OF_TEXT,)
    minimum = len(ByteLevel.alphabet()) + len(special)
    if vocab_size < minimum:
        raise InputError(
            f"`vocab_size` must be at least {minimum}, for every byte and {', '.join(special)}. "
            f"Received: {vocab_size}."
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=list(special),
        initial_alphabet=ByteLevel.alphabet(),  # so that no text has an unknown byte
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if is_encoder:
        set_template(tokenizer, tokenization.CLS, tokenization.SEP)
    return tokenizer


def set_template(tokenizer, start, end):
    """Let a tokenizer open and close texts and pairs as ModernBERT's does, by two of its tokens.

    Offsets into texts stay as they were, with or without the white space before words.
    """
    template = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B {end}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )
    old = json.loads(tokenizer.to_str())["post_processor"] or {}
    trims = [one for one in old.get("processors", [old]) if one.get("trim_offsets")]  # RoBERTa's does too
    trimming = [TrimOffsets(add_prefix_space=one["add_prefix_space"], trim_offsets=True) for one in trims[:1]]
    tokenizer.post_processor = Sequence([*trimming, template]) if trimming else template


def save(tokenizer, path):
    with storage.open_file(path, "wb") as file:
        file.write(tokenizer.to_str(pretty=True).encode())
