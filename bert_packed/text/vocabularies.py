"""The two kinds of vocabulary, WordPieces and byte-level BPE: file, check, training, loading."""

import dataclasses
from pathlib import Path

from bert_packed import schema
from bert_packed.core.settings import InputError
from bert_packed.text import byte_bpe, tokenization
from bert_packed.text.byte_bpe import DocumentTokenizer

WORDPIECES, TOKENIZER_JSON = "vocab.txt", "tokenizer.json"


def file_name(vocab_file):
    """The name of a vocabulary's file in a folder of Hugging Face, which says its kind."""
    return TOKENIZER_JSON if str(vocab_file).endswith(".json") else WORDPIECES


def lowers_case(path, do_lower_case):
    """Whether texts lose their case: by `do_lower_case` for WordPieces; a tokenizer.json has its own rule."""
    return do_lower_case and file_name(path) == WORDPIECES


def count_tokens(path, argument="vocab_file"):
    """Number of tokens of a file of either kind, lines as they are; `argument` names the flag in messages."""
    if file_name(path) == TOKENIZER_JSON:
        return byte_bpe.load(path, argument).vocab_size
    return len(Path(path).read_bytes().rstrip(b"\r\n").splitlines())


def boundary_ids(vocab_file):
    """Ids of the tokens that open and close a document, by transformers' names; None without vocabulary."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"))
    if not vocab_file:
        return ids
    if file_name(vocab_file) == TOKENIZER_JSON:
        found = byte_bpe.load(vocab_file)
        return dict(zip(ids, (found.start_id, found.end_id), strict=True))
    vocabulary = tokenization.load_vocab(vocab_file)
    return dict(zip(ids, (vocabulary.cls_id, vocabulary.sep_id), strict=True))


def encoder_ids(vocab_file):
    """Ids of an encoder's special tokens, by transformers' names; None for those that are not known."""
    ids = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "cls", "sep", "mask", "pad"))
    if not vocab_file:
        return ids
    if file_name(vocab_file) == TOKENIZER_JSON:
        found = byte_bpe.find_encoder_tokens(byte_bpe.load(vocab_file).tokenizer)
    else:
        vocabulary = tokenization.load_vocab(vocab_file)
        found = vocabulary.cls_id, vocabulary.sep_id, vocabulary.mask_id, schema.PADDING_ID
    # The first two, which open and close a sequence, have two names
    return dict(zip(ids, (*found[:2], *found), strict=True)) if found else ids


@dataclasses.dataclass(frozen=True)
class WordPieces:
    """BERT's WordPieces."""

    vocab_size: int  # size of a trained one
    do_lower_case: bool  # strip case and accents
    file_name = WORDPIECES

    def check(self, path):
        """Raise `InputError` unless the file is such a vocabulary."""
        if file_name(path) == TOKENIZER_JSON:
            raise InputError(
                "`vocab_file` must have one WordPiece a line; a tokenizer.json is for --tokenizer=byte_bpe. "
                f"Received: {path}."
            )
        tokenization.load_vocab(path)

    def train(self, texts, path):
        """Train on texts, an iterable of lists of str that may be iterated twice, and write the file."""
        vocabulary = tokenization.train_vocab(texts, self.vocab_size, self.do_lower_case)
        tokenization.save_vocab(vocabulary, path)

    def load(self, path):
        """`DocumentTokenizer` of the file: [CLS] opens a document, [SEP] closes it."""
        vocabulary = tokenization.load_vocab(path)
        tokenizer = tokenization.make_tokenizer(vocabulary, self.do_lower_case)
        return DocumentTokenizer(tokenizer, vocabulary.cls_id, vocabulary.sep_id, len(vocabulary))

    def describe(self, path):
        """Facts of the file for a manifest: dict with `vocab_size` and others."""
        return {"vocab_size": len(tokenization.load_vocab(path)), "do_lower_case": self.do_lower_case}


@dataclasses.dataclass(frozen=True)
class ByteBpe:
    """Byte-level BPE, or any other `tokenizer.json`, with the methods of `WordPieces`."""

    vocab_size: int
    is_encoder: bool = False  # its tokens are masked
    file_name = TOKENIZER_JSON

    def check(self, path):
        (byte_bpe.load_encoder_vocabulary if self.is_encoder else byte_bpe.load)(path)

    def train(self, texts, path):
        byte_bpe.save(byte_bpe.train(texts, self.vocab_size, self.is_encoder), path)

    def load(self, path):
        return byte_bpe.load(path)

    def describe(self, path):
        return {"vocab_size": byte_bpe.load(path).vocab_size}


def load_maskable(path):
    """`tokenization.Vocabulary`, or the alike `byte_bpe.EncoderVocabulary` of a `tokenizer.json`."""
    is_json = file_name(path) == TOKENIZER_JSON
    return (byte_bpe.load_encoder_vocabulary if is_json else tokenization.load_vocab)(path)


def load_text_tokenizer(path, do_lower_case):
    """`tokenization.TextTokenizer` of either kind; `do_lower_case` is of WordPieces alone."""
    if file_name(path) == TOKENIZER_JSON:
        return byte_bpe.load_byte_tokenizer(path)
    return tokenization.make_text_tokenizer(tokenization.load_vocab(path), do_lower_case)
