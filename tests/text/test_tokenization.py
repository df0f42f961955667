"""Vocabularies train reproducibly and apply as BERT's do; the columnar corpus holds every WordPiece."""

import os
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bert_packed.core import storage
from bert_packed.core.settings import InputError
from bert_packed.text import tokenization
from data_gen.text import columns, token_corpus

SPECIAL = list(tokenization.SPECIAL_TOKENS)
WORDS = ["un", "##aff", "##able", "runn", "##ing", "want", "##ed", ",", "cafe", "mask", "[", "]"]
VOCABULARY = tokenization.Vocabulary((*SPECIAL, *WORDS))


def to_tokens(vocabulary, text, do_lower_case=True):
    tokenizer = tokenization.make_tokenizer(vocabulary, do_lower_case)
    (ids,) = tokenization.encode_sentences(tokenizer, [text])
    return [vocabulary.tokens[index] for index in ids]


def test_longest_piece_first_lower_case_without_accents():
    tokens = to_tokens(VOCABULARY, "UNwanted, Runn\u00efng unaffable CAF\u00c9")
    # "unwanted" is unknown as a whole: "want" may open a word but not continue one
    assert tokens == ["[UNK]", ",", "runn", "##ing", "un", "##aff", "##able", "cafe"]


def test_case_stays_where_wanted():
    assert to_tokens(VOCABULARY, "Cafe cafe", do_lower_case=False) == ["[UNK]", "cafe"]


def test_chinese_characters_stand_apart_and_words_may_be_long():
    vocabulary = tokenization.Vocabulary((*SPECIAL, "\u4e2d", "\u56fd", "a", "##a"))
    assert to_tokens(vocabulary, "\u4e2d\u56fda") == ["\u4e2d", "\u56fd", "a"]
    assert to_tokens(vocabulary, "a" * 100) == ["a", *["##a"] * 99]
    assert to_tokens(vocabulary, "a" * 101) == ["[UNK]"]  # past the tokenizer's limit of a word


def test_a_special_token_in_the_text_is_text():
    assert to_tokens(VOCABULARY, "[MASK]") == ["[", "mask", "]"]


def test_vocabulary_round_trip_and_roles(tmp_path):
    tokenization.save_vocab(VOCABULARY, tmp_path / "vocab.txt")
    loaded = tokenization.load_vocab(tmp_path / "vocab.txt")
    assert loaded == VOCABULARY
    assert (loaded.cls_id, loaded.sep_id, loaded.mask_id, len(loaded)) == (2, 3, 4, 17)
    assert [loaded.tokens[i] for i in loaded.ordinary_ids] == WORDS
    assert [t for t, c in zip(loaded.tokens, loaded.is_continuation, strict=True) if c] == [
        "##aff", "##able", "##ing", "##ed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content, message",
    [
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
    storage.make_folder("ram://vocabularies")
    path = f"ram://vocabularies/{len(end)}{end == chr(10)}.txt"
    with storage.open_file(path, "wb") as file:
        file.write(("\ufeff" + end.join([*SPECIAL, "\u2028", "a"]) + end).encode())
    assert tokenization.load_vocab(path).tokens == (*SPECIAL, "\u2028", "a")
    tokenization.save_vocab(VOCABULARY, f"{path}.saved")
    assert tokenization.load_vocab(f"{path}.saved") == VOCABULARY


def make_sentences(seed=0, num_sentences=200):
    """Nonsense with many ties, which is where the order of a hash map would show."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(300)]
    return [" ".join(rng.choice(words, 8)).capitalize() + "." for _ in range(num_sentences)]


def test_training_is_reproducible():
    sentences = make_sentences()
    first = tokenization.train_vocab([sentences], 300, True)
    for _ in range(4):
        assert tokenization.train_vocab([sentences], 300, True) == first
    assert list(first.tokens[:5]) == SPECIAL
    assert len(first) == len(set(first.tokens)) == 300
    assert "[UNK]" not in to_tokens(first, " ".join(sentences))
    assert "##." not in first.ids  # punctuation never continues a word


def test_training_uses_whole_words_where_the_text_repeats_them():
    vocabulary = tokenization.train_vocab([["The cat sat on the mat with the cat."]] * 5, 100, True)
    assert to_tokens(vocabulary, "The cat") == ["the", "cat"]
    assert len(vocabulary) < 100  # so short a text has no more to merge


def test_too_small_a_vocabulary():
    with pytest.raises(InputError, match=r"`vocab_size` must be at least \d+.*Received: 20\."):
        tokenization.train_vocab([make_sentences()], 20, True)


@pytest.mark.parametrize(
    ("batch", "characters", "sizes"),
    [(3, 100, [3, 3, 1]), (9, 5, [1, 2, 1, 2, 1]), (9, 1, [1] * 7), (9, 100, [7])],
)
def test_batches_are_small_in_sentences_and_characters(monkeypatch, batch, characters, sizes):
    monkeypatch.setattr(tokenization, "ENCODE_BATCH", batch)
    monkeypatch.setattr(tokenization, "ENCODE_CHARACTERS", characters)
    sentences = list(enumerate(["aaaaaa", "bb", "ccc", "ddddd", "e", "ffff", "gg"], 1))
    found = list(tokenization.batches(iter(sentences)))
    assert [len(held) for held in found] == sizes
    assert [pair for held in found for pair in held] == sentences


@pytest.mark.parametrize("batch", [1, 2, 4096])
def test_corpus_holds_every_sentence(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(tokenization, "ENCODE_BATCH", batch)
    sentences = [(1, "wanted"), (1, "\u200b"), (2, "\ufffd"), (2, " ")]
    sentences += [(4, "cafe, cafe"), (4, "unaffable"), (4, "mask")]
    tokenizer = tokenization.make_tokenizer(VOCABULARY, True)
    corpus = token_corpus.encode_documents(iter(sentences), tokenizer, tmp_path)
    pieces = [[["want", "##ed"]], [["cafe", ",", "cafe"], ["un", "##aff", "##able"], ["mask"]]]
    found = []
    for first, last in pairwise(corpus.document_offsets):
        offsets = corpus.sentence_offsets[first : last + 1]
        spans = [corpus.token_ids[a:b] for a, b in pairwise(offsets)]
        found.append([[VOCABULARY.tokens[i] for i in span] for span in spans])
    assert found == pieces
    assert corpus.num_documents == 2
    assert np.fromfile(tmp_path / "document_numbers", np.int64).tolist() == [1, 4]
    assert corpus.document_lengths([1, 0]).tolist() == [7, 2]
    assert corpus.token_ids.dtype == np.int32


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_corpus_gives_its_pages_back(tmp_path):
    np.arange(2**21, dtype=np.int32).tofile(tmp_path / "token_ids")  # 8 MiB
    np.array([0, 2**21]).tofile(tmp_path / "sentence_offsets")
    np.array([0, 1]).tofile(tmp_path / "document_offsets")
    corpus = token_corpus.open_corpus(tmp_path)

    def shared_pages():
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")

    corpus.token_ids.sum()
    held = shared_pages()
    corpus.release()
    assert held - shared_pages() > 7 * 2**20
    assert corpus.token_ids[[0, -1]].tolist() == [0, 2**21 - 1]  # and maps them again


def test_a_corpus_behind_a_url_is_copied_once_and_anew_where_it_changed(monkeypatch):
    folders = []
    monkeypatch.setattr(tempfile, "mkdtemp", folders.append)  # no folder that outlives the process
    tokenizer = tokenization.make_tokenizer(VOCABULARY, True)
    storage.make_folder("ram://corpus")
    for text in ("wanted", "mask mask mask"):
        corpus = token_corpus.encode_documents([(1, text)], tokenizer, "ram://corpus")
        want = [VOCABULARY.tokens[index] for index in corpus.token_ids]
        assert want == to_tokens(VOCABULARY, text)
        again = token_corpus.open_corpus("ram://corpus")
        assert again.token_ids is corpus.token_ids
    assert not folders


@pytest.mark.parametrize("values", [1, 2, 2**20])
def test_joined_corpora_hold_all_in_order(tmp_path, monkeypatch, values):
    monkeypatch.setattr(columns, "COPY_VALUES", values)
    tokenizer = tokenization.make_tokenizer(VOCABULARY, True)
    texts = [[(1, "wanted mask"), (1, "cafe"), (3, "mask")], [(2, "cafe mask"), (4, "unaffable")]]
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, sentences in zip(folders, texts, strict=True):
        folder.mkdir()
        token_corpus.encode_documents(sentences, tokenizer, folder)
    (tmp_path / "all").mkdir()
    token_corpus.join_corpora(folders, tmp_path / "all")
    corpus = token_corpus.open_corpus(tmp_path / "all")
    assert [VOCABULARY.tokens[index] for index in corpus.token_ids] == (
        ["want", "##ed", "mask", "cafe", "mask", "cafe", "mask", "un", "##aff", "##able"]
    )
    assert corpus.sentence_offsets.tolist() == [0, 3, 4, 5, 7, 10]
    assert corpus.document_offsets.tolist() == [0, 2, 3, 4, 5]
    text_files, numbers = token_corpus.open_origins(tmp_path / "all")
    assert (text_files.tolist(), numbers.tolist()) == ([0, 0, 1, 1], [1, 3, 2, 4])


def test_a_vocabulary_of_words_that_were_counted_in_parts(monkeypatch):
    whole = tokenization.train_vocab([make_sentences()], 300, True)
    monkeypatch.setattr(tokenization, "MAX_WORDS_HELD", 10)
    held = []

    class Watched(Counter):
        def clear(self):
            held.append(len(self))
            super().clear()

    monkeypatch.setattr(tokenization, "Counter", Watched)
    sentences = make_sentences()
    assert tokenization.train_vocab([[sentence] for sentence in sentences], 300, True) == whole
    # Words are dropped as soon as one sentence brought more than may be held
    assert len(held) > 2 and max(held) <= 10 + max(len(sentence.split()) for sentence in sentences)


def test_a_corpus_without_a_token(tmp_path):
    tokenizer = tokenization.make_tokenizer(VOCABULARY, True)
    assert token_corpus.encode_documents([(1, "\u200b")], tokenizer, tmp_path).num_documents == 0
