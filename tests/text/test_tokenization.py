"""Vocabularies train reproducibly and apply as BERT's do."""

import numpy as np
import pytest

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.text import tokenization
from bert_packed.text.vocabularies import ByteBpe, WordPieces

SPECIAL = list(tokenization.SPECIAL_TOKENS)
WORDS = ["un", "##aff", "##able", "runn", "##ing", "want", "##ed", ",", "cafe", "mask", "[", "]"]
VOCABULARY = tokenization.Vocabulary((*SPECIAL, *WORDS))


def to_tokens(vocabulary, text, do_lower_case=True):
    tokenizer = tokenization.make_tokenizer(vocabulary, do_lower_case)
    (ids,) = tokenization.encode_sentences(tokenizer, [text])
    return [vocabulary.tokens[index] for index in ids]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # "unwanted" is unknown as a whole: "want" may open a word but not continue one
        ("UNwanted, Runn\u00efng unaffable", ["[UNK]", ",", "runn", "##ing", "un", "##aff", "##able"]),
        ("CAF\u00c9", ["cafe"]),
        ("\u4e2d\u56fda", ["\u4e2d", "\u56fd", "a"]),
        ("a" * 100, ["a", *["##a"] * 99]),
        ("a" * 101, ["[UNK]"]),  # past the tokenizer's limit of a word
        ("[MASK]", ["[", "mask", "]"]),  # a special token in the text is text
    ],
)
def test_words_are_spelt_by_their_longest_pieces(text, tokens):
    vocabulary = tokenization.Vocabulary((*SPECIAL, *WORDS, "\u4e2d", "\u56fd", "a", "##a"))
    assert to_tokens(vocabulary, text) == tokens


def test_vocabulary_round_trip_and_roles(tmp_path):
    tokenization.save_vocab(VOCABULARY, tmp_path / "vocab.txt")
    loaded = tokenization.load_vocab(tmp_path / "vocab.txt")
    assert loaded == VOCABULARY
    assert (loaded.cls_id, loaded.sep_id, loaded.mask_id, len(loaded)) == (2, 3, 4, 17)
    assert [loaded.tokens[i] for i in loaded.ordinary_ids] == WORDS
    assert np.array(loaded.tokens)[loaded.is_continuation].tolist() == ["##aff", "##able", "##ing", "##ed"]


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"model": {}}', r"one WordPiece a line, or end in \.json .* Received: .*vocab\.txt,"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"vocab\.txt, where \[MASK\] is missing"),
        ("a\nb\n", r"where \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\] are missing"),
        ("[UNK]\n[PAD]\n[CLS]\n[SEP]\n[MASK]\n", r"\[PAD\] in its first line.*it is in line 2"),
        (b"\xff\xff", r"vocab.txt must be UTF-8"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", r"must hold a WordPiece besides the special tokens"),
    ],
)
def test_unusable_vocabulary(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        tokenization.load_vocab(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_vocabulary_with_any_line_ends_on_any_disk(end):
    storage.make_folder("memory://vocabularies")
    path = f"memory://vocabularies/{len(end)}{end == chr(10)}.txt"
    with storage.open_file(path, "wb") as file:
        file.write(("\ufeff" + end.join([*SPECIAL, "\u2028", "a"]) + end).encode())
    assert tokenization.load_vocab(path).tokens == (*SPECIAL, "\u2028", "a")
    tokenization.save_vocab(VOCABULARY, f"{path}.saved")
    assert tokenization.load_vocab(f"{path}.saved") == VOCABULARY


def test_training_is_reproducible():
    """Nonsense has many ties, which is where the order of a hash map would show."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(300)]
    sentences = [" ".join(rng.choice(words, 8)).capitalize() + "." for _ in range(200)]
    first = tokenization.train_vocab([sentences], 300, True)
    for _ in range(4):
        assert tokenization.train_vocab([sentences], 300, True) == first
    assert list(first.tokens[:5]) == SPECIAL
    assert len(first) == len(set(first.tokens)) == 300
    assert "[UNK]" not in to_tokens(first, " ".join(sentences))
    assert "##." not in first.ids  # punctuation never continues a word
    with pytest.raises(InputError, match=r"`vocab_size` must be at least \d+.*Received: 20\."):
        tokenization.train_vocab([sentences], 20, True)


# There are capitals, and accents in both forms; some open a word and some continue one
LETTERS = (
    "Été été ÉTÉ Naïve naïve cafe\u0301 Cafe\u0301 NASA nasa Ünder Ärger straße ŁÓDŹ łódź Ελλάδα ΕΛΛΆΔΑ."
)


@pytest.mark.parametrize("do_lower_case", [True, False])
@pytest.mark.parametrize("make", [WordPieces, ByteBpe])
def test_a_vocabulary_spells_the_text_it_was_trained_on(tmp_path, make, do_lower_case):
    """The fault that this alone finds: letters, or words, of another case than those that are read later."""
    kind = make(320, do_lower_case) if make is WordPieces else make(320, is_encoder=True)
    path = str(tmp_path / kind.file_name)
    kind.train([[LETTERS]] * 3, path)
    tokenizer = kind.load(path).tokenizer
    tokens = tokenizer.encode(LETTERS, add_special_tokens=False).tokens
    assert tokens and tokenization.UNK not in tokens
    if make is WordPieces:
        spelt = "".join(tokens)
        # Words that are repeated are whole, and so without the mark of what continues one
        assert spelt == tokenizer.normalizer.normalize_str(LETTERS).replace(" ", "")
        assert (spelt == LETTERS.replace(" ", "")) != do_lower_case
        # Nothing else is spelt: the letters of the other case would be rows that no text uses
        assert {*"".join(tokenization.load_vocab(path).tokens[5:])} - {"#"} == {*spelt}
