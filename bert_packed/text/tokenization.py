"""Texts as tokens of an encoder; WordPiece vocabularies, read or trained, and BERT's tokenization by them."""

import dataclasses
from collections import Counter
from functools import cached_property
from unicodedata import category

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from bert_packed import schema
from bert_packed.core import storage
from bert_packed.core.settings import InputError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"  # opens every WordPiece that continues a word
MAX_ALPHABET = 1000  # characters that a trained vocabulary spells words with; rarer ones become [UNK]
MAX_WORDS_HELD = 2**20  # about 100 MB
FIRST_MARK = "\u0300"  # no combining mark comes before it
ENCODE_BATCH = 4096  # sentences
ENCODE_CHARACTERS = 2**20  # of a batch: a token costs the tokenizer some hundred bytes


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """WordPieces by id; id 0 is [PAD]."""

    tokens: tuple[str, ...]

    def __len__(self):
        return len(self.tokens)

    @cached_property
    def ids(self):
        """Dict from WordPiece to id; the last id of equal WordPieces counts, as in google-research/bert."""
        return {token: index for index, token in enumerate(self.tokens)}

    @cached_property
    def is_continuation(self):
        """bool `[V]`: the WordPiece continues a word."""
        return np.array([token.startswith(CONTINUATION) for token in self.tokens])

    @cached_property
    def ordinary_ids(self):
        """int32 `[V - 5]`, ascending: all ids but those of the special tokens."""
        special = [self.ids[token] for token in SPECIAL_TOKENS]
        return np.setdiff1d(np.arange(len(self.tokens)), special).astype(np.int32)

    @property
    def cls_id(self):
        return self.ids[CLS]

    @property
    def sep_id(self):
        return self.ids[SEP]

    @property
    def mask_id(self):
        return self.ids[MASK]


def load_vocab(path):
    """`Vocabulary` of a file with one WordPiece a line, whose id is the line's number from 0."""
    text = storage.read_text(path)
    # `splitlines` would take WordPieces such as U+2028 for line ends
    line_end = "\n" if "\n" in text else "\r"
    tokens = tuple(line.strip("\r\n\t ") for line in text.rstrip("\r\n").split(line_end))
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing and text.lstrip().startswith("{"):
        raise InputError(
            "`vocab_file` must have one WordPiece a line, or end in .json where it is byte-level BPE. "
            f"Received: {path}, which holds JSON."
        )
    if missing:
        raise InputError(
            f"`vocab_file` must hold {', '.join(SPECIAL_TOKENS)}. "
            f"Received: {path}, where {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
        )
    if tokens.index(PAD) != schema.PADDING_ID:
        raise InputError(
            f"`vocab_file` must have {PAD} in its first line, because id {schema.PADDING_ID} is padding. "
            f"Received: {path}, where it is in line {tokens.index(PAD) + 1}."
        )
    vocabulary = Vocabulary(tokens)
    if not len(vocabulary.ordinary_ids):
        raise InputError(
            f"`vocab_file` must hold a WordPiece besides the special tokens. Received: {path}, with none."
        )
    return vocabulary


def save_vocab(vocabulary, path):
    with storage.open_file(path, "wb") as file:
        file.write("".join(f"{token}\n" for token in vocabulary.tokens).encode())


def make_tokenizer(vocabulary, do_lower_case):
    """BERT's tokenizer: punctuation apart, longest WordPiece first; `do_lower_case` strips accents too."""
    # Special tokens are not registered: "[MASK]" in a text about BERT is punctuation and letters, not a mask
    tokenizer = Tokenizer(WordPiece(vocabulary.ids, unk_token=UNK, max_input_chars_per_word=100))
    tokenizer.normalizer = _normalizer(do_lower_case)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of texts, and what makes sequences of their tokens.

    White space is nothing to WordPieces. Tokens of bytes begin with that before a word:

        text     Ada wrote  it.     WordPieces   ada  wrote  it     .
                                    places       0 3  4 9    11 13  13 14
                                    bytes        Ada  Ġwrote Ġ      Ġit    .
                                    places       0 3  3 9    9 10   10 13  13 14
    """

    tokenizer: Tokenizer
    cls_id: int  # opens a sequence
    sep_id: int  # closes each of its texts
    unknown_id: int  # takes the place of a word without a token
    unknown_token: str
    vocab_size: int  # the largest id and 1

    def encode(self, texts):
        """Ids of texts, without special tokens: list of str -> list of lists of ids."""
        return encode_sentences(self.tokenizer, texts)

    def encode_with_places(self, texts):
        """Pairs of ids, a list, and places, int32 `[tokens, 2]`: first character, and one past the last.

        Places ascend, but those of tokens that are bytes of one character are equal. A token's characters
        include combining marks that follow, and the rest of what a normalizer composed to one character.
        """
        codes = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(code.ids, _complete(text, code.offsets)) for text, code in zip(texts, codes, strict=True)]

    def encode_words(self, sentences):
        """Ids of words within their sentence, a space before each but the first.

        List by sentence of lists of str -> list by sentence of lists by word of lists of ids, which are empty
        for a word without a token.
        """
        spaced = [" " * (place > 0) + word for words in sentences for place, word in enumerate(words)]
        found = iter(self.encode(spaced))
        return [[next(found) for _ in words] for words in sentences]


def _complete(text, offsets):
    """Places of tokens with all their characters, by a tokenizer's offsets."""
    # Offsets leave out the mark of "cafe\u0301" where accents are stripped, and all but the first of three
    # letters where Hangul is composed
    next_starts = [*(start for start, _ in offsets), len(text)][1:]
    places = []
    for (start, end), next_start in zip(offsets, next_starts, strict=True):
        while end < len(text) and (
            _is_mark(text[end]) or (end < next_start and category(text[end])[0] in "LM")
        ):
            end += 1
        places.append((start, end))
    return np.array(places, np.int32).reshape(-1, 2)


def _is_mark(character):
    return character >= FIRST_MARK and category(character) == "Mn"


def make_text_tokenizer(vocabulary, do_lower_case):
    """`TextTokenizer` of a `Vocabulary` of WordPieces."""
    tokenizer = make_tokenizer(vocabulary, do_lower_case)
    special = vocabulary.cls_id, vocabulary.sep_id, vocabulary.ids[UNK], UNK
    return TextTokenizer(tokenizer, *special, len(vocabulary))


def encode_sentences(tokenizer, sentences):
    """Encode sentences without adding special tokens: list of str -> list of lists of ids."""
    # The fast form computes no offsets into the text
    return [code.ids for code in tokenizer.encode_batch_fast(sentences, add_special_tokens=False)]


def batches(sentences):
    """Lists of pairs (number of the document, sentence), within `ENCODE_BATCH` and `ENCODE_CHARACTERS`."""
    held, num_characters = [], 0
    for number, sentence in sentences:
        if held and (len(held) == ENCODE_BATCH or num_characters + len(sentence) > ENCODE_CHARACTERS):
            yield held
            held, num_characters = [], 0
        held.append((number, sentence))
        num_characters += len(sentence)
    if held:
        yield held


def train_vocab(texts, vocab_size, do_lower_case):
    """Train WordPieces from lists of sentences, iterated twice; equal text gives an equal vocabulary."""
    alphabet, continuations = _find_alphabet(texts, do_lower_case)
    # `tokenizers` numbers the continuation characters (`##a`) in the order of a hash map and breaks ties of
    # its merges by these numbers, so that two trainings on the same text differ. As special tokens they are
    # numbered beforehand, in sorted order
    fixed = [*SPECIAL_TOKENS, *(CONTINUATION + character for character in continuations)]
    minimum = len(fixed) + len(alphabet)
    if vocab_size < minimum:
        raise InputError(
            f"`vocab_size` must be at least {minimum}, for the special tokens and the characters of "
            f"this text. Received: {vocab_size}."
        )
    tokenizer = Tokenizer(WordPiece(unk_token=UNK))
    tokenizer.normalizer = _normalizer(do_lower_case)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab(with_added_tokens=False)
    return Vocabulary(tuple(sorted(ids, key=ids.get)))


def _find_alphabet(texts, do_lower_case):
    """The most frequent characters of the words, sorted, and those among them that continue a word."""
    normalizer, pre_tokenizer = _normalizer(do_lower_case), BertPreTokenizer()
    words, counts, continuing = Counter(), Counter(), set()

    def count_characters():
        for text, count in words.items():
            for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)):
                continuing.update(word[1:])
                for character in word:
                    counts[character] += count
        words.clear()

    for sentences in texts:
        for sentence in sentences:
            words.update(sentence.split())
        if len(words) > MAX_WORDS_HELD:
            count_characters()
    count_characters()
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[:MAX_ALPHABET]
    return sorted(frequent), sorted(continuing.intersection(frequent))


def _normalizer(do_lower_case):
    return BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=do_lower_case, lowercase=do_lower_case
    )
