"""SQuAD files: what is read from good ones, and one clear line for each way of being bad."""

import pytest
from squad_files import CONTEXT, QUESTIONS, entry, write

from bert_packed.core.settings import InputError
from bert_packed.tasks.squad.files import read_squad
from bert_packed.text import tokenization


def test_questions_contexts_and_answers(tmp_path):
    found = read_squad(write(tmp_path / "a.json", *QUESTIONS), for_training=True)
    assert [question.id for question in found.questions] == ["q1", "q2", "q3", "q4", "q5", "q6"]
    assert [question.context_index for question in found.questions] == [0, 0, 0, 1, 1, 1]
    assert found.contexts[0] == CONTEXT
    for question in found.questions:
        text, start = question.answers[0]
        assert found.contexts[question.context_index][start : start + len(text)] == text
    assert found.num_skipped == {"answers not in their context": 0}


def test_files_to_predict_on_need_no_answers(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"data": [{"paragraphs": [{"context": "", "qas": [{"id": "1", "question": "?"}]}]}]}')
    found = read_squad(path, for_training=False)
    assert found.questions[0].answers == ()
    with pytest.raises(InputError, match=r"a.json, question 1: must have an answer to train on"):
        read_squad(path, for_training=True)


def test_impossible_questions_are_v2(tmp_path):
    path = write(tmp_path / "a.json", (CONTEXT, [entry("1", "?", is_impossible=True)]), version="v2.0")
    with pytest.raises(InputError, match=r"question 1: must have an answer, unless --version_2_with_neg"):
        read_squad(path, for_training=True)
    assert read_squad(path, for_training=True, version_2_with_negative=True).questions[0].is_impossible
    # v2.0 files may give impossible questions plausible answers: scores go by them, training does not
    path = write(
        tmp_path / "b.json", (CONTEXT, [entry("1", "?", "1843", is_impossible=True)]), version="v2.0"
    )
    assert read_squad(path, True, version_2_with_negative=True).questions[0].answers == ()
    assert read_squad(path, False).questions[0].answers == (("1843", CONTEXT.index("1843")),)


@pytest.mark.parametrize("place", ["context", "question", "answer"])
def test_half_characters_are_named_and_whole_ones_read(tmp_path, place):
    def text(name):
        return "ab\ud800c" if name == place else "ab\U0001f600c"

    path = write(
        tmp_path / "a.json", (text("context"), [entry("1", text("question"), text("answer"), start=0)])
    )
    with pytest.raises(
        InputError, match=r"must be Unicode text. Received: '\\ud800' at character 2"
    ) as error:
        read_squad(path, for_training=False)
    str(error.value).encode()
    place = "none"
    path = write(tmp_path / "a.json", (text("context"), [entry("1", text("question"), "ab", start=0)]))
    assert read_squad(path, for_training=True).contexts == ("ab\U0001f600c",)


def test_ids_are_unique(tmp_path):
    path = write(tmp_path / "a.json", (CONTEXT, [entry("1", "?")]), (CONTEXT, [entry("1", "?")]))
    with pytest.raises(
        InputError,
        match=r"article 1, paragraph 2, question 1: every question must have its own id. Received: '1', "
        r"which article 1, paragraph 1, question 1 has too",
    ):
        read_squad(path, for_training=False)


def test_answers_that_are_not_in_their_context(tmp_path):
    path = write(
        tmp_path / "a.json",
        (
            CONTEXT,
            [
                entry("1", "?", "1843"),
                entry("2", "?", "1843", start=3),
                entry("3", "?", "Ada", start=-1),
                entry("4", "?", "numbers.", start=len(CONTEXT) - 3),
                entry("5", "?", " "),
            ],
        ),
    )
    with pytest.raises(InputError) as error:
        read_squad(path, for_training=True)
    assert "question 2: an answer must be in the context at its answer_start" in str(error.value)
    assert "'1843' at answer_start 3, where the context has ' Lov'; 4 of 5 questions" in str(error.value)
    found = read_squad(path, for_training=True, skip_bad_answers=True)
    assert [question.id for question in found.questions] == ["1"]
    assert found.num_skipped == {"answers not in their context": 4}
    assert len(read_squad(path, for_training=False).questions) == 5


@pytest.mark.parametrize("answer", ["\u200b", "\u00a0\u200e", "\x00", "\ufffd"])
def test_answers_that_no_token_stands_for_are_bad(tmp_path, answer):
    context = f"one {answer} two"
    path = write(
        tmp_path / "a.json",
        (context, [entry("1", "?", "two", context), entry("2", "?", answer, context)]),
    )
    with pytest.raises(InputError, match=r"question 2: an answer must be .* an empty answer"):
        read_squad(path, for_training=True)
    found = read_squad(path, for_training=True, skip_bad_answers=True)
    assert [question.id for question in found.questions] == ["1"]
    assert found.num_skipped == {"answers not in their context": 1}
    # The tokenizer indeed makes nothing of it
    vocabulary = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, "one", "two"))
    assert tokenization.encode_sentences(tokenization.make_tokenizer(vocabulary, True), [answer]) == [[]]
