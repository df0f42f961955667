"""Classifiers from Python: what cannot be predicted, and tags of words.

The fault that this file alone catches: tags of a sentence of several windows in other words' places.
"""

import numpy as np
import pytest
from encoder_files import WORDS, write_encoder

import bert_packed
from bert_packed.core.settings import InputError
from bert_packed.tasks.classify.inference import TextClassifier
from bert_packed.tasks.classify.labels import NUMBER, Problem
from bert_packed.tasks.ner.config import NerConfig

LENGTH = 24
TEXTS = [
    ("ab", "`texts` must be a list of str or of pairs. Received: 'ab'."),
    (["a", ("b", "c")], "`texts[1]` must be a str, as the first. Received: ('b', 'c')."),
    ([("a", "b"), "cd"], "`texts[1]` must be a pair of str, as the first. Received: 'cd'."),
    ([("a",)], "`texts[0]` must be a pair of str, as the first. Received: ('a',)."),
    (["a", None], "`texts[1]` must be a str, as the first. Received: None."),
    ([("a", "b")], "`texts` must have single texts, as the model was trained on. Received: pairs of texts."),
]


@pytest.mark.parametrize(("texts", "message"), TEXTS)
def test_texts_that_cannot_be_are_named(texts, message):
    classifier = TextClassifier(None, None, Problem(NUMBER, num_texts=1), 8, 1)
    assert classifier.predict([]).probabilities.shape == (0, 1)
    with pytest.raises(InputError) as error:
        classifier.predict(texts)
    assert str(error.value) == message


@pytest.mark.usefixtures("uncompiled")
def test_tags_of_words_from_python(tmp_path):
    """The same as the command writes, also of a sentence of several windows."""
    sentences = [[WORDS[(7 * place + size) % 26] for place in range(size)] for size in (3, 1, 30, 5)]
    lines = ["".join(f"{word} {('O', 'B-X')[len(word) % 2]}\n" for word in words) for words in sentences]
    (tmp_path / "words.txt").write_text("\n".join(lines))
    flags = dict.fromkeys(("train_file", "predict_file"), str(tmp_path / "words.txt"))
    sizes = {"max_seq_length": LENGTH, "doc_stride": LENGTH // 2, "train_batch_size": 2}
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
