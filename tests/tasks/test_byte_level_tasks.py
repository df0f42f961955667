"""Sequences of tokens of bytes: those of transformers with our export, answers cut by characters."""

import itertools
import json

import numpy as np
import pytest
from byte_tokenizers import LINES, NORMALIZERS, SPECIAL_IDS, TOKENIZERS, load, ours, with_normalizer
from reference import import_reference
from squad_files import QUESTIONS, entry, write
from tokenizers import decoders, normalizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as TrimOffsets

from bert_packed.checkpoints.export_formats import write_tokenizer
from bert_packed.tasks.ner.conll import make_tag_sequences
from bert_packed.tasks.rows import make_text_sequences
from bert_packed.tasks.squad.files import read_squad
from bert_packed.tasks.squad.predictions import extract
from bert_packed.tasks.squad.windows import make_windows
from bert_packed.text.vocabularies import encoder_ids

CLS, SEP, MASK = SPECIAL_IDS["ours"][:3]
# Accents before and after their letter, half and whole Hangul, characters of four bytes, signs joined to one
CONTEXTS = (
    *LINES,
    "  The  cafe\u0301 in\u00a0\ud55c\uad6d, \u1112\u1161\u11ab and \u732b\U0001f408\u200d\u2b1b!\n\n\t1843 ",
    "\ufb01ne \u0130stanbul, na\u00efve Stra\u00dfe\u2026 e\u0323\u0301  x",
)


def reference_tokenizer(folder):
    """The tokenizer that transformers finds in an export with the `tokenizer.json` of a folder."""
    _, transformers = import_reference()
    path, exported = folder / "tokenizer.json", folder / "exported"
    exported.mkdir()
    write_tokenizer(exported, path, do_lower_case=True, ids=encoder_ids(path))
    (exported / "config.json").write_text(json.dumps({"model_type": "modernbert"}))
    return transformers.AutoTokenizer.from_pretrained(exported, split_special_tokens=True)


def cut(sequences, name="tokens"):
    offsets = sequences.offsets(name)
    return [sequences[name][a:b].tolist() for a, b in itertools.pairwise(offsets)]


def span_by_run_qa(offsets, first, answer, start):
    """The label of transformers' `run_qa.py` for a window of places: a token each side of the answer."""
    if offsets[0][0] > start or offsets[-1][1] < start + len(answer):
        return [0, 0]
    left, right = 0, len(offsets) - 1
    while left < len(offsets) and offsets[left][0] <= start:
        left += 1
    while right >= 0 and offsets[right][1] >= start + len(answer):
        right -= 1
    return [left - 1 + first, right + 1 + first]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("length", "stride"), [(64, 16), (48, 200)])
def test_windows_are_those_of_transformers(tmp_path, name, length, stride):
    """All sequences and places, and the labels of ASCII contexts, where no token is part of a character."""
    made = [(context, [entry(f"e{n}", "  Who?", context=context)]) for n, context in enumerate(CONTEXTS)]
    questions = read_squad(write(tmp_path / "a.json", *QUESTIONS, *made), for_training=False)
    windows = make_windows(questions, load(tmp_path, TOKENIZERS[name]()), length, stride, 64)
    reference = reference_tokenizer(tmp_path)
    tokens, numbers, compared = cut(windows.sequences), iter(range(len(windows.windows))), 0
    for question in questions.questions:
        text, context = question.text.lstrip(), questions.contexts[question.context_index]
        num_query = len(reference(text, add_special_tokens=False)["input_ids"])
        found = reference(
            text,
            context,
            truncation="only_second",
            max_length=length,
            stride=max(0, length - num_query - 3 - stride),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True):
            number = next(numbers)
            assert tokens[number] == ids
            if not context.isascii():
                continue
            window, first = windows.windows[number], num_query + 2
            own = slice(window.token_start, window.token_start + window.num_tokens)
            places = windows.token_places[question.context_index][own].tolist()
            assert [tuple(place) for place in places] == offsets[first:-1]
            if question.answers:
                want = span_by_run_qa(offsets[first:-1], first, *question.answers[0])
                assert windows.answer_spans[number].tolist() == want
                compared += any(want)
    assert next(numbers, None) is None
    assert len(windows.windows) > len(questions.questions) + 8 and compared >= 5


# ---- answers


@pytest.mark.parametrize("name", NORMALIZERS)
def test_places_ascend_and_hold_every_visible_character(tmp_path, name):
    for context, (ids, places) in zip(
        CONTEXTS, load(tmp_path, with_normalizer(name)).encode_with_places(list(CONTEXTS)), strict=True
    ):
        assert len(ids) == len(places) > 10
        assert (np.diff(places, axis=0) >= 0).all() and (places[:, 0] <= places[:, 1]).all()
        held = {place for first, last in places.tolist() for place in range(first, last)}
        assert all(place in held or character.isspace() for place, character in enumerate(context))


def test_offsets_are_not_trimmed_by_the_file(tmp_path):
    """Its tokenizer adds a space, of which its post-processor knows nothing."""
    tokenizer = ours()
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = TrimOffsets(add_prefix_space=False, trim_offsets=True)
    (ids, places), *_ = load(tmp_path, tokenizer).encode_with_places(["packs of cats"])
    assert tokenizer.id_to_token(ids[0]) == "\u0120packs" and places[0].tolist() == [0, 5]
    assert tokenizer.encode("packs of cats", add_special_tokens=False).offsets[0] == (1, 5)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_answers_begin_and_end_with_a_character(tmp_path, name):
    """Of all spans of random logits: none is empty, or has white space around it, or is not in the text."""
    made = [(context, [entry(str(number), "who?")]) for number, context in enumerate(CONTEXTS)]
    questions = read_squad(write(tmp_path / "a.json", *made), for_training=False)
    windows = make_windows(questions, load(tmp_path, with_normalizer(name)), 64, 32, 16)
    rng, num_white = np.random.default_rng(0), 0
    logits = [rng.normal(size=(2, n)) for n in windows.sequences["lengths"]]
    for window, (start, end) in zip(windows.windows, logits, strict=True):
        question = questions.questions[window.question_index]
        places = windows.token_places[question.context_index][window.token_start :]
        for place in range(window.num_tokens):
            if not questions.contexts[question.context_index][slice(*places[place])].strip():
                start[window.first_token + place] = end[window.first_token + place] = 9  # the best of all
                num_white += 1
    assert num_white > 10
    found = extract(questions, windows, logits, n_best_size=100)
    for question in questions.questions:
        texts = [answer["text"] for answer in found.nbest[question.id]]
        assert len(texts) == len({*texts}) > 50
        assert all(text and text == text.strip() for text in texts)
        assert all(text in questions.contexts[question.context_index] for text in texts)


# ---- texts, and words


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_and_pairs_are_those_of_transformers(tmp_path, name):
    tokenizer = load(tmp_path, TOKENIZERS[name]())
    reference = reference_tokenizer(tmp_path)
    one, two = [*CONTEXTS, ""], ["Packs of cats ", *CONTEXTS]
    for texts in ([one], [one, two]):
        sequences, num_cut = make_text_sequences(texts, tokenizer, 512)
        assert num_cut == 0 and cut(sequences) == reference(*texts)["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_are_those_of_their_sentence(tmp_path, name):
    tokenizer = load(tmp_path, TOKENIZERS[name]())
    reference = reference_tokenizer(tmp_path)
    sentences = [context.split() for context in CONTEXTS] + [["It", "'s", "a", "don't", "-", "...", "1,5"]]
    tags = [[number % 5 for number in range(len(words))] for words in sentences]
    found = make_tag_sequences(sentences, tags, tokenizer, 512, 64)
    asked = cut(found.sequences, "prediction_positions")
    assert found.num_empty == 0 and cut(found.sequences, "prediction_ids") == tags
    for words, ids, positions in zip(sentences, cut(found.sequences), asked, strict=True):
        theirs = reference(" ".join(words), return_offsets_mapping=True)
        assert ids == theirs["input_ids"]
        ends = np.cumsum([len(word) + 1 for word in words]) - 1
        # The first token that has a character of the word, or the space before it
        starts = [0, *ends[:-1].tolist()]
        first = [
            next(i for i, (a, b) in enumerate(theirs["offset_mapping"][1:-1], 1) if b > start)
            for start in starts
        ]
        assert positions == first


def test_a_word_that_the_normalizer_removes_is_masked(tmp_path):
    tokenizer = ours()
    tokenizer.normalizer = normalizers.Replace("\u200b", "")
    assert isinstance(tokenizer.decoder, decoders.ByteLevel)
    text_tokenizer = load(tmp_path, tokenizer)
    assert text_tokenizer.unknown_token == "[MASK]"
    found = make_tag_sequences([["\u200b", "cats"]], [[1, 2]], text_tokenizer, 16, 6)
    ((start, first, *_, end),) = cut(found.sequences)
    assert (start, first, end, found.num_empty) == (CLS, MASK, SEP, 1)
