"""Questions, contexts and answers of SQuAD's v1.1 and v2.0 JSON, checked.

    {"version": "1.1", "data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": 0}]}]}]}]}

v2.0 adds `is_impossible`: the question then has no answer in its context.
"""

import dataclasses
import re
from unicodedata import category

from bert_packed.core.settings import InputError
from bert_packed.core.storage import read_json

LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write them; no tokenizer reads them
WHERE_NAMES = ("article", "paragraph", "question", "answer")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with its context."""

    id: str
    text: str
    context_index: int  # into `QuestionSet.contexts`
    # Texts and their first characters in the context. Scores use them even where the question
    # `is_impossible`, as in the official script; training does not
    answers: tuple[tuple[str, int], ...]
    is_impossible: bool  # in v2.0, where the context does not answer it


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """A file's questions, in its order."""

    contexts: tuple[str, ...]  # one for each paragraph
    questions: tuple[Question, ...]
    num_skipped: dict[str, int]  # from a problem to the number of questions left out for it


def read_squad(path, for_training, version_2_with_negative=False, skip_bad_answers=False):
    """Read and check a SQuAD file: `QuestionSet`.

    Args:
        for_training: True where answers are learned from: they must then exist and be in the context.
        version_2_with_negative: True where questions may have no answer.
        skip_bad_answers: True to leave out, and count, questions whose answer is not where the file says.

    Raises `InputError`, which names the place in the file.
    """
    contexts, questions, bad, places = [], [], [], {}
    for where, paragraph in _paragraphs(path):
        contexts.append(_field(path, paragraph, "context", str, where))
        for number, entry in enumerate(_field(path, paragraph, "qas", list, where), 1):
            place = (*where, number)
            question = _question(path, entry, place, len(contexts) - 1, for_training)
            if question.id in places:
                raise InputError(
                    f"{path}, {_words(place)}: every question must have its own id. Received: "
                    f"{question.id!r}, which {_words(places[question.id])} has too."
                )
            places[question.id] = place
            if for_training:
                _check_trainable(path, question, version_2_with_negative)
                if problem := _misplaced(question, contexts[-1]):
                    bad.append((question.id, problem))
                    continue
            questions.append(question)
    if bad and not skip_bad_answers:
        raise InputError(
            f"{path}, question {bad[0][0]}: an answer must be in the context at its answer_start, unless "
            f"--skip_bad_answers. Received: {bad[0][1]}; {len(bad)} of {len(bad) + len(questions)} questions "
            "are like this."
        )
    if not questions:
        raise InputError(f"{path} must hold a question. Received: none, and {len(bad)} with bad answers.")
    return QuestionSet(tuple(contexts), tuple(questions), {"answers not in their context": len(bad)})


def _paragraphs(path):
    """Yield the numbers of each article and paragraph, and the paragraph."""
    for number, article in enumerate(_field(path, read_json(path), "data", list, ()), 1):
        for place, paragraph in enumerate(_field(path, article, "paragraphs", list, (number,)), 1):
            yield (number, place), paragraph


def _question(path, entry, where, context_index, for_training):
    identifier = _field(path, entry, "id", str, where)
    is_impossible = entry.get("is_impossible", False)
    if not isinstance(is_impossible, bool):
        raise InputError(
            f"{path}, question {identifier}: `is_impossible` must be true or false. "
            f"Received: {is_impossible!r}."
        )
    answers = []
    # Files to predict on may come without any
    for number, answer in enumerate(_field(path, entry, "answers", list, where, default=[]), 1):
        place = (*where, number)
        text = _field(path, answer, "text", str, place)
        answers.append((text, _field(path, answer, "answer_start", int, place)))
    return Question(
        identifier,
        _field(path, entry, "question", str, where),
        context_index,
        () if is_impossible and for_training else tuple(answers),
        is_impossible,
    )


def _check_trainable(path, question, version_2_with_negative):
    if question.is_impossible and not version_2_with_negative:
        raise InputError(
            f"{path}, question {question.id}: must have an answer, unless --version_2_with_negative. "
            "Received: is_impossible."
        )
    if not question.is_impossible and not question.answers:
        raise InputError(f"{path}, question {question.id}: must have an answer to train on. Received: none.")


def _misplaced(question, context):
    """The problem of the answer that training takes, the first; "" where there is none."""
    if not question.answers:
        return ""
    text, start = question.answers[0]
    if not any(map(_is_visible, text)):
        return f"an empty answer, {text!a}" if text else "an empty answer"
    found = context[max(start, 0) : max(start, 0) + len(text)]
    if start < 0 or found != text:
        return f"answer {text!r} at answer_start {start}, where the context has {found!r}"
    return ""


def _is_visible(character):
    """True if BERT's tokenizer keeps a character: it drops controls, format marks and spaces."""
    return category(character)[0] not in "CZ" and character != "\ufffd"


def _field(path, content, name, kind, where, default=None):
    """A value of a JSON object, of the kind that it must be."""
    place = f"{path}, {_words(where)}" if where else f"{path}"
    if not isinstance(content, dict):
        raise InputError(f"{place}: must be a JSON object. Received: {type(content).__name__}.")
    value = content.get(name, default)
    if name not in content and default is None:
        raise InputError(f"{place}: must have {name!r}. Received: {', '.join(content) or 'no keys'}.")
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "a list", str: "text", int: "a whole number"}
        raise InputError(f"{place}: {name!r} must be {names[kind]}. Received: {value!r:.80}.")
    if kind is str and (found := LONE_SURROGATE.search(value)):
        raise InputError(
            f"{place}: {name!r} must be Unicode text. Received: {found[0]!a} at character {found.start()}, "
            "half of a character."
        )
    return value


def _words(where):
    """(1, 2) -> "article 1, paragraph 2"."""
    return ", ".join(f"{name} {number}" for name, number in zip(WHERE_NAMES, where, strict=False))
