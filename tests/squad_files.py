"""Small SQuAD files for tests, and a vocabulary for them."""

import json

from bert_packed.text import tokenization

CONTEXT = (
    "Ada Lovelace wrote the first program in 1843. The program computes Bernoulli numbers, not prime numbers."
)
WORDS = (
    "the first program pro ##gram ##s wrote in 1843 cafe ete ##s ja ##pan ##ese what who ? , . ( ) - $ 5 a"
)
VOCABULARY = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, *dict.fromkeys(WORDS.split())))
TOKENIZER = tokenization.make_text_tokenizer(VOCABULARY, do_lower_case=True)


def entry(identifier, question, answer=None, context=CONTEXT, start=None, **more):
    """One `qas` entry whose answer is where it is found first, or at `start`."""
    answers = []
    if answer is not None:
        answers = [{"text": answer, "answer_start": context.find(answer) if start is None else start}]
    return {"id": identifier, "question": question, "answers": answers, **more}


def content(*paragraphs, version="1.1"):
    """A file's content from `(context, entries)`."""
    return {
        "version": version,
        "data": [{"title": "t", "paragraphs": [{"context": c, "qas": list(q)} for c, q in paragraphs]}],
    }


def write(path, *paragraphs, version="1.1"):
    """Write a file; returns its path as text."""
    path.write_text(json.dumps(content(*paragraphs, version=version)))
    return str(path)


PACKS = "A pack holds several sequences. Padding goes last, and no sequence sees its neighbour."
QUESTIONS = (
    (
        CONTEXT,
        (
            entry("q1", "Who wrote the first program?", "Ada Lovelace"),
            entry("q2", "When was the first program written?", "1843"),
            entry("q3", "What does it compute?", "Bernoulli numbers"),
        ),
    ),
    (
        PACKS,
        (
            entry("q4", "What does a pack hold?", "several sequences", PACKS),
            entry("q5", "Where does padding go?", "last", PACKS),
            entry("q6", "What does no sequence see?", "its neighbour", PACKS),
        ),
    ),
)
