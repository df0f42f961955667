"""Windows as google-research/bert cuts them, and every answer on the tokens that hold its characters."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizers import load, with_normalizer
from squad_files import QUESTIONS, TOKENIZER, VOCABULARY, entry, write

from bert_packed.tasks.squad import files as squad
from bert_packed.tasks.squad import windows as squad_windows
from bert_packed.tasks.squad.windows import answer_tokens, make_windows, most_context, window_starts
from bert_packed.text import tokenization

DATA = Path(__file__).parents[3] / "shared/data"


def windows_of(tmp_path, context, *entries, tokenizer=TOKENIZER, length=64, stride=32, query=16):
    path = write(tmp_path / "a.json", (context, entries))
    questions = squad.read_squad(path, for_training=False)
    return questions, make_windows(questions, tokenizer, length, stride, query)


def read_back(questions, windows):
    """The text that each window's labels mark, or None, by an independent loop."""
    found = []
    for window, (start, end) in zip(windows.windows, windows.answer_spans.tolist(), strict=True):
        if start == end == 0:
            found.append(None)
            continue
        question = questions.questions[window.question_index]
        places = windows.token_places[question.context_index]
        first = places[start - window.first_token + window.token_start][0]
        last = places[end - window.first_token + window.token_start][1]
        found.append(questions.contexts[question.context_index][first:last])
    return found


W = "WordPieces"


@pytest.mark.parametrize(
    ("name", "context", "answer", "start", "want"),
    [
        (W, "The first program", "first", None, "first"),
        (W, "the  first\n\tprogram", "first\n\tprogram", None, "first\n\tprogram"),
        (W, "Le Caf\u00e9, the first", "Caf\u00e9", None, "Caf\u00e9"),
        (W, "a cafe\u0301 in 1843", "cafe\u0301", None, "cafe\u0301"),  # the accent is a separate character
        (W, "in 1843 (the program), who", "the program", None, "the program"),
        (W, "in 1843 (the program), who", "1843 (the", None, "1843 (the"),
        (W, "$5 in 1843", "5", None, "5"),
        (W, "a 1843 a 1843 a 1843", "1843", 16, "1843"),
        (W, "the first \u4e2d\u56fd program", "\u56fd", None, "\u56fd"),
        (W, "wrote\u00a0in\u202f1843", "1843", None, "1843"),
        (W, "\ufeffthe\u200b first", "first", None, "first"),
        (W, "Japanese program", "Japan", None, "Japan"),  # pieces ja ##pan ##ese
        (W, "first programs", "program", None, "program"),
        (W, "programs", "ogr", None, "program"),  # inside pieces: all that it touches
        (W, "\U0001f600 the first \U0001f600", "first", None, "first"),
        # Tokens of bytes, by a tokenizer that has few merges
        ("none", "The  first\n\tprogram", "first\n\tprogram", None, "first\n\tprogram"),
        ("none", "a packs b", "packs", None, " packs"),  # a token of the space and the word
        ("none", "in 1843 (the program)", " 1843 ", 2, "1843"),  # with white space around it
        ("none", "a \u732b b \u732b c", "\u732b", 6, "\u732b"),
        ("none", "x\U0001f408\u200d\u2b1b y", "\U0001f408", None, "\U0001f408"),
        ("none", "a cafe\u0301 in", "cafe\u0301", None, "cafe\u0301"),
        ("nfc", "a cafe\u0301 in", "cafe\u0301", None, "cafe\u0301"),
        ("nfc", "a cafe\u0301 in", "cafe\u0301 in", None, "cafe\u0301 in"),
        ("nfc", "ab \u1112\u1161\u11ab in", "\u1112\u1161\u11ab", None, "\u1112\u1161\u11ab"),
        ("nfd", "a caf\u00e9, in", "caf\u00e9", None, "caf\u00e9"),
        ("nfkc", "so \ufb01ne", "\ufb01", None, "\ufb01"),
        ("uncased", "in \u0130zmir", "\u0130zmir", None, " \u0130zmir"),
        ("uncased", "Le Cafe\u0301!", "Cafe\u0301", None, "Cafe\u0301"),
        ("strip", "  1843 in ", "1843", None, "1843"),
        ("one_space", "a   1843  b", "1843", None, "1843"),
    ],
)
def test_answers_keep_their_characters(tmp_path, name, context, answer, start, want):
    """Their tokens are all that have a character of them, and no others."""
    tokenizer = TOKENIZER if name == W else load(tmp_path, with_normalizer(name))
    asked = entry("1", "who?", answer, context, start)
    questions, windows = windows_of(tmp_path, context, asked, tokenizer=tokenizer)
    assert read_back(questions, windows) == [want]
    begin = context.index(answer.strip(), start or 0)
    end, places = begin + len(answer.strip()), windows.token_places[0].tolist()
    touching = [place for place, (first, past) in enumerate(places) if first < end and past > begin]
    first, last = windows.answer_spans[0] - windows.windows[0].first_token
    assert touching == list(range(first, last + 1))


def test_sequences_are_question_and_window(tmp_path):
    _, windows = windows_of(tmp_path, "the first program", entry("1", "who wrote?", "first", "the first"))
    sequences, ids = windows.sequences, VOCABULARY.ids
    tokens = [VOCABULARY.tokens[token] for token in sequences["tokens"]]
    assert tokens == ["[CLS]", "who", "wrote", "?", "[SEP]", "the", "first", "program", "[SEP]"]
    assert sequences["token_type_ids"].tolist() == [0] * 5 + [1] * 4
    assert windows.answer_spans.tolist() == [[6, 6]]
    assert windows.windows[0].first_token == 5
    assert ids["[CLS]"] == sequences["tokens"][0]


def test_window_starts():
    assert window_starts(8, 6, 4) == [(0, 6), (4, 4)]
    assert window_starts(6, 6, 4) == [(0, 6)]
    assert window_starts(0, 6, 4) == []
    # A stride over the window: run_squad.py then steps by the window, and leaves nothing out
    assert window_starts(10, 4, 9) == [(0, 4), (4, 4), (8, 2)]


def plain_most_context(starts):
    """run_squad.py's rule as a loop."""
    found = []
    for row, (start, size) in enumerate(starts):
        flags = []
        for position in range(start, start + size):
            best = None
            for other, (begin, length) in enumerate(starts):
                end = begin + length - 1
                if begin <= position <= end:
                    score = min(position - begin, end - position) + 0.01 * length
                    if best is None or score > best[0]:
                        best = (score, other)
            flags.append(best[1] == row)
        found.append(flags)
    return found


@pytest.mark.parametrize(
    ("tokens", "size", "stride"), [(8, 6, 4), (300, 50, 20), (97, 40, 39), (5, 9, 3), (400, 384, 300)]
)
def test_most_context_equals_a_loop(tokens, size, stride):
    starts = window_starts(tokens, size, stride)
    found = most_context(starts)
    assert [flags.tolist() for flags in found] == plain_most_context(starts)
    times = np.zeros(tokens, int)
    for (start, length), flags in zip(starts, found, strict=True):
        times[start : start + length] += flags
    assert (times == 1).all()


def test_windows_of_a_long_context_take_memory_by_its_length():
    starts = window_starts(20_000, 300, 100)
    tracemalloc.start()
    try:
        found = most_context(starts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, found)) == sum(size for _, size in starts)
    assert peak < 50 * 20_000  # windows times tokens, as 8-byte numbers, were 32 MB


def test_answers_cut_by_window_edges(tmp_path):
    context = "a a a a a a the first program a a a"
    # [CLS] who ? [SEP] window [SEP]: 8 tokens of context a window
    questions, windows = windows_of(
        tmp_path, context, entry("1", "who?", "the first program", context), length=13, stride=4
    )
    assert [(w.token_start, w.num_tokens) for w in windows.windows] == [(0, 8), (4, 8)]
    assert read_back(questions, windows) == [None, "the first program"]
    assert windows.answer_spans[0].tolist() == [0, 0]


@pytest.mark.parametrize(("name", "blank"), [(W, " \u200b "), ("none", " \n ")])
def test_questions_without_answer_and_contexts_without_word(tmp_path, name, blank):
    path = write(
        tmp_path / "a.json",
        ("the first", [entry("1", "who?", is_impossible=True)]),
        (blank, [entry("2", "what?", is_impossible=True)]),
    )
    questions = squad.read_squad(path, True, version_2_with_negative=True)
    tokenizer = TOKENIZER if name == W else load(tmp_path, with_normalizer(name))
    windows = make_windows(questions, tokenizer, 32, 16, 8)
    assert len(windows.windows) == 1 and windows.num_empty == 1
    assert windows.answer_spans.tolist() == [[0, 0]]


def test_long_questions_are_cut_and_counted(tmp_path):
    _, windows = windows_of(
        tmp_path, "the first", entry("1", "who what who who?"), entry("2", "who who ?"), query=3
    )
    assert windows.num_truncated == 1
    words = [VOCABULARY.tokens[token] for token in windows.sequences["tokens"]]
    assert words[:5] == ["[CLS]", "who", "what", "who", "[SEP]"]  # the end is what is cut
    assert windows.sequences["lengths"].tolist() == [3 + 3 + 2, 3 + 3 + 2]


def bert_span(tokenize, context, text, start):
    """The answer's tokens as run_squad.py finds them, written as plain loops."""
    words, word_of_character = [], []
    before_was_space = True
    for character in context:
        if character in " \t\r\n\u202f":
            before_was_space = True
        else:
            if before_was_space:
                words.append("")
            words[-1] += character
            before_was_space = False
        word_of_character.append(len(words) - 1)
    first_word, last_word = word_of_character[start], word_of_character[start + len(text) - 1]
    pieces, first_of_word = [], []
    for word in words:
        first_of_word.append(len(pieces))
        pieces += tokenize(word)
    first_of_word.append(len(pieces))
    first, last = first_of_word[first_word], first_of_word[last_word + 1] - 1
    answer = tokenize(text)
    for new_first in range(first, last + 1):
        for new_last in range(last, new_first - 1, -1):
            if pieces[new_first : new_last + 1] == answer:
                return (new_first, new_last), len(pieces)
    return (first, last), len(pieces)


def test_official_dev_set_has_berts_windows_and_spans():
    files = [DATA / "squad" / f"squad-v1.1-dev-articles-{part}.json" for part in ("train", "eval")]
    vocab = DATA / "vocab" / "bert-base-uncased-vocab.txt"
    if not all(path.is_file() for path in (*files, vocab)):
        pytest.skip(f"needs SQuAD and the bert-base-uncased vocabulary in {DATA}")
    tokenizer = tokenization.make_text_tokenizer(tokenization.load_vocab(vocab), do_lower_case=True)

    def tokenize(text):
        return tokenizer.tokenizer.encode(text, add_special_tokens=False).tokens

    num_questions = num_windows = 0
    differing = []
    for path in files:
        questions = squad.read_squad(path, for_training=True)
        windows = make_windows(questions, tokenizer, 384, 128, 64)
        num_questions += len(questions.questions)
        num_windows += len(windows.windows)
        assert windows.sequences["lengths"].max() == 384
        for question in questions.questions[::10]:
            text, start = question.answers[0]
            places = windows.token_places[question.context_index]
            want, num_pieces = bert_span(tokenize, questions.contexts[question.context_index], text, start)
            assert num_pieces == len(places)
            if answer_tokens(question, places) != want:
                differing.append(text)
    assert (num_questions, num_windows) == (10570, 10833)
    # Answers that begin or end within a word: run_squad.py labels the whole word, or all of its pieces
    assert len(differing) <= 5, differing


def test_contexts_that_are_encoded_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(squad_windows, "ENCODE_AT_ONCE", 1)
    questions = squad.read_squad(write(tmp_path / "a.json", *QUESTIONS), for_training=True)
    windows = make_windows(questions, TOKENIZER, 64, 32, 16)
    assert read_back(questions, windows) == [question.answers[0][0] for question in questions.questions]
