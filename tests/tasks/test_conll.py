"""CoNLL files: read in their form, cut into windows that ask for a word once, where it has most context."""

import numpy as np
import pytest
from encoder_files import WORDS, write_encoder

import bert_packed
from bert_packed.core.settings import InputError
from bert_packed.tasks.ner.config import NerConfig
from bert_packed.tasks.ner.conll import find_tags, make_tag_sequences, number_tags, read_conll
from bert_packed.text import tokenization

TEXT = """-DOCSTART- -X- O O

EU NNP I-NP B-ORG
rejects VBZ I-VP O

-DOCSTART- -X- O O
a\tDT\tO
b\u00a0c  NN\tB-PER

"""
CLS, SEP, UNK = 2, 3, 1


def test_a_file(tmp_path):
    path = tmp_path / "train.txt"
    for text in (
        TEXT,
        TEXT.replace("\n", "\r\n"),
        "\ufeff" + TEXT,
        TEXT.rstrip("\n"),
        TEXT.replace("\n\n", "\n \t\n"),
    ):
        path.write_bytes(text.encode())
        found = read_conll(path)
        assert found.words == [["EU", "rejects"], ["a", "b\u00a0c"]]
        assert found.tags == [["B-ORG", "O"], ["O", "B-PER"]]
        assert (found.line_numbers, found.num_words) == ([3, 7], 4)
    assert find_tags(found) == ("B-ORG", "B-PER", "O")
    assert number_tags(path, found, ("O", "B-PER", "B-ORG")) == [[2, 0], [0, 1]]
    with pytest.raises(InputError, match=r"line 8: the tag must be one of O, B-ORG. Received: 'B-PER'"):
        number_tags(path, found, ("O", "B-ORG"))
    path.write_text("a\nb\n\nc\n")
    assert (read_conll(path).words, read_conll(path).tags) == ([["a", "b"], ["c"]], None)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, "a", "b", "##c", "##d"))
    return tokenization.make_text_tokenizer(vocabulary, True)


def test_sequences_by_hand(tokenizer):
    a, b, c, d = 5, 6, 7, 8
    found = make_tag_sequences([["A", "bcd"], ["\u200b", "ac", "zz"]], [[1, 2], [3, 0, 1]], tokenizer, 8, 4)
    assert found.sequences["tokens"].tolist() == [CLS, a, b, c, d, SEP, CLS, UNK, a, c, UNK, SEP]
    assert found.sequences["lengths"].tolist() == [6, 6] and not found.sequences["token_type_ids"].any()
    assert found.sequences["prediction_positions"].tolist() == [1, 2, 1, 2, 4]
    assert found.sequences["prediction_ids"].tolist() == [1, 2, 3, 0, 1]
    assert found.sequences["num_predictions"].tolist() == [2, 3]
    assert (found.words.tolist(), found.num_cut, found.num_empty) == ([0, 1, 2, 3, 4], 0, 1)


@pytest.mark.parametrize(("length", "stride"), [(8, 1), (8, 6), (9, 3), (16, 200)])
def test_every_word_is_asked_once_with_the_most_context(tokenizer, length, stride):
    rng = np.random.default_rng(0)
    words = [
        ["".join(["a", *rng.choice(["c", "d"], rng.integers(0, 5))]) for _ in range(rng.integers(1, 30))]
        for _ in range(40)
    ]
    tags = [rng.integers(0, 9, len(sentence)).tolist() for sentence in words]
    found = make_tag_sequences(words, tags, tokenizer, length, stride)
    sequences = found.sequences
    assert sorted(found.words.tolist()) == list(range(sum(map(len, words))))
    flat_words = [word for sentence in words for word in sentence]
    flat_tags = [tag for sentence in tags for tag in sentence]
    assert sequences["lengths"].max() == length and found.num_cut > 5
    assert sequences["num_predictions"].min() >= 1
    pieces = [tokenizer.encode(sentence) for sentence in words]
    first_words = np.cumsum([0, *map(len, words)])
    for number in range(len(sequences)):
        tokens = sequences["tokens"][slice(*sequences.offsets("tokens")[number : number + 2])]
        assert tokens[0] == CLS and tokens[-1] == SEP
        own = slice(*sequences.offsets("prediction_ids")[number : number + 2])
        sentence = sequences["record_numbers"][number] - 1
        asked = sequences["prediction_positions"][own], sequences["prediction_ids"][own], found.words[own]
        for position, tag, word in zip(*asked, strict=True):
            assert tag == flat_tags[word]
            first, *rest = pieces[sentence][word - first_words[sentence]]
            assert flat_words[word] and tokens[position] == first
            inside = tokens[position + 1 : -1]
            assert inside[: len(rest)].tolist() == rest[: len(inside)]
            total = sum(map(len, pieces[sentence]))
            here = min(position - 1, len(tokens) - 2 - position)
            place = sum(map(len, pieces[sentence][: word - first_words[sentence]]))
            # No window that a plain loop makes has more on the side where it has less
            assert here >= max(plain_contexts(place, total, length - 2, stride))


def plain_contexts(place, total, size, stride):
    start = 0
    while True:
        stop = min(start + size, total)
        if start <= place < stop:
            yield min(place - start, stop - 1 - place)
        if stop == total:
            return
        start += min(stride, stop - start)


@pytest.mark.usefixtures("uncompiled")
def test_tags_of_words_from_python(tmp_path):
    """The same as the command writes, also of a sentence of several windows."""
    sentences = [[WORDS[(7 * place + size) % 26] for place in range(size)] for size in (3, 1, 30, 5)]
    lines = ["".join(f"{word} {('O', 'B-X')[len(word) % 2]}\n" for word in words) for words in sentences]
    (tmp_path / "words.txt").write_text("\n".join(lines))
    flags = dict.fromkeys(("train_file", "predict_file"), str(tmp_path / "words.txt"))
    sizes = {"max_seq_length": 24, "doc_stride": 12, "train_batch_size": 2}
    sizes |= {"eval_steps": 2, "keep_best": True}
    folder = tmp_path / "run"
    config = NerConfig(
        **flags, **sizes, init_checkpoint=str(write_encoder(tmp_path / "start")), output_dir=str(folder)
    )
    bert_packed.finetune(config)
    written = [part.split("\n") for part in (folder / "predictions.txt").read_text().strip().split("\n\n")]
    tagger = bert_packed.load_classifier(folder / "model")
    found = tagger.predict(sentences)
    assert found.labels == [[line.split(" ")[-1] for line in part] for part in written]
    assert tagger.names == ("B-X", "O") and [len(part) for part in found.probabilities] == [3, 1, 30, 5]
    for part, tags in zip(found.probabilities, found.labels, strict=True):
        np.testing.assert_allclose(part.sum(axis=1), 1, rtol=1e-5)
        assert [tagger.names[place] for place in part.argmax(axis=1)] == tags
    with pytest.raises(InputError, match=r"`sentences\[0\]` must be a list of words. Received: 'a b'"):
        tagger.predict(["a b"])
    assert tagger.predict([]).labels == []
