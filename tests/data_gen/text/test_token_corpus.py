"""A corpus on the disk holds every token of its documents, and where these come from."""

import tempfile
from itertools import pairwise

import numpy as np
import pytest

from bert_packed.core import storage
from bert_packed.text import tokenization
from bert_packed.text.vocabularies import WordPieces
from data_gen.text import token_corpus
from data_gen.text.text_records import BertRecords
from data_gen.text.token_corpus import SENTENCES, join_corpora, open_corpus, write_corpus

WORDS = ["un", "##aff", "##able", "want", "##ed", ",", "cafe", "mask"]
VOCABULARY = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *WORDS))


@pytest.fixture
def encode(tmp_path):
    """Function that writes sentences, (number of the document, str), to a folder and opens the corpus."""
    vocab_path = str(tmp_path / "vocab.txt")
    tokenization.save_vocab(VOCABULARY, vocab_path)

    def encode(sentences, folder, file_index=0):
        storage.make_folder(str(folder))
        pieces = BertRecords(WordPieces(0, True), None, 1).encode(iter(sentences), vocab_path)
        num_documents = write_corpus(pieces, SENTENCES, folder, file_index)
        corpus = open_corpus(folder, SENTENCES)
        assert num_documents == corpus.num_documents
        return corpus

    return encode


def to_words(token_ids):
    return [VOCABULARY.tokens[index] for index in token_ids]


@pytest.mark.parametrize("batch", [1, 2, 4096])
def test_corpus_holds_every_sentence(encode, tmp_path, monkeypatch, batch):
    monkeypatch.setattr(tokenization, "ENCODE_BATCH", batch)
    monkeypatch.setattr(token_corpus, "HELD_TOKENS", batch)
    sentences = [(1, "wanted"), (1, "\u200b"), (2, "\ufffd"), (2, " ")]
    sentences += [(4, "cafe, cafe"), (4, "unaffable"), (4, "mask")]
    corpus = encode(sentences, tmp_path / "corpus", file_index=3)
    found = []
    for first, last in pairwise(corpus.document_offsets):
        offsets = corpus.sentence_offsets[first : last + 1]
        found.append([to_words(corpus.token_ids[a:b]) for a, b in pairwise(offsets)])
    assert found == [[["want", "##ed"]], [["cafe", ",", "cafe"], ["un", "##aff", "##able"], ["mask"]]]
    assert (corpus.document_files.tolist(), corpus.document_numbers.tolist()) == ([3, 3], [1, 4])
    assert corpus.document_lengths([1, 0]).tolist() == [7, 2]
    assert corpus.token_ids.dtype == np.int32


def test_a_corpus_behind_a_url_is_copied_when_it_changed(encode, monkeypatch):
    folders = []
    monkeypatch.setattr(tempfile, "mkdtemp", folders.append)  # no folder that outlives the process
    for text in ("wanted", "mask mask mask"):
        corpus = encode([(1, text)], "memory://corpus")
        assert "".join(to_words(corpus.token_ids)).replace("##", "") == text.replace(" ", "")
        assert open_corpus("memory://corpus", SENTENCES).token_ids is corpus.token_ids
    assert not folders


@pytest.mark.parametrize("values", [1, 2, 2**20])
def test_joined_corpora_hold_all_in_order(encode, tmp_path, monkeypatch, values):
    monkeypatch.setattr(token_corpus, "COPY_VALUES", values)
    texts = [[(1, "wanted mask"), (1, "cafe"), (3, "mask")], [(2, "cafe mask"), (4, "unaffable")]]
    for index, sentences in enumerate(texts):
        encode(sentences, tmp_path / str(index), index)
    (tmp_path / "all").mkdir()
    join_corpora([tmp_path / "0", tmp_path / "1"], SENTENCES, tmp_path / "all")
    corpus = open_corpus(tmp_path / "all", SENTENCES)
    assert to_words(corpus.token_ids) == (
        ["want", "##ed", "mask", "cafe", "mask", "cafe", "mask", "un", "##aff", "##able"]
    )
    assert corpus.sentence_offsets.tolist() == [0, 3, 4, 5, 7, 10]
    assert corpus.document_offsets.tolist() == [0, 2, 3, 4, 5]
    assert corpus.document_files.tolist() == [0, 0, 1, 1]
    assert corpus.document_numbers.tolist() == [1, 3, 2, 4]
