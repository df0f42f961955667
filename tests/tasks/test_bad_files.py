"""Files of all tasks that cannot be read: the error names the file, the place in it, and the mistake.

The fault that this file alone catches: a bad line or row that is read as something else, or left out.
"""

import json

import pytest
from encoder_files import write_beir

from bert_packed.core.settings import InputError
from bert_packed.tasks.classify.labels import SINGLE, Problem, find_problem, read_examples
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.embed.scores import read_evaluation
from bert_packed.tasks.glue.files import TASKS, read_glue
from bert_packed.tasks.ner.conll import read_conll
from bert_packed.tasks.squad.files import read_squad


def read_task(name):
    return lambda path: TASKS[name].problem.numbers(read_glue(path, TASKS[name]))


def read_labels(path):
    """As classes a and b."""
    return Problem(SINGLE, ("a", "b")).numbers(read_examples(path))


def question(**changes):
    """A file of one question, as JSON."""
    entry = {"id": "7", "question": "?", **changes}
    return json.dumps({"data": [{"paragraphs": [{"context": "x", "qas": [entry]}]}]})


def labels(*values):
    return "".join(json.dumps({"text": "a", "label": value}) + "\n" for value in values)


def problem_of(path):
    return find_problem(read_examples(path))


def squad_of(path):
    return read_squad(path, for_training=False)


NEGATIVE = '{"anchor": "a", "positive": "b"}\n{"anchor": "a", "positive": "b", "negative": "c"}\n'
MISTAKES = [
    # GLUE
    (read_task("SST-2"), "sentence\tlabel\na\t1\nb\n", "line 3: must have at least 2 columns. Received: 1:"),
    (read_task("SST-2"), "sentence\tlabel\na\tx\n", "line 2: the label must be one of 0, 1. Received: 'x'"),
    (read_task("SST-2"), "sentence\tlabel\n\xff\t1\n", " must be UTF-8"),
    (read_task("STS-B"), "sentence1\tsentence2\tscore\na\tb\tnan\n", "line 2: the label must be a number"),
    (read_task("CoLA"), "gj04\t2\t\ta\n", "line 1: the label must be one of 0, 1. Received: '2'"),
    (read_task("RTE"), "a\tb\n", " must have a column 'sentence1'. Received: a, b"),
    (read_task("RTE"), "sentence1\tsentence2\tlabel\n", " must have a line below its header"),
    (read_task("RTE"), "", " must have a line. Received: an empty file"),
    (read_task("RTE"), None, " must exist. Received: no such file"),
    # CoNLL
    (read_conll, "a O\nb\n", "line 2: must have a tag in its last column, as the lines before"),
    (read_conll, "a\n\nb O\n", "line 3: must have one column, as the lines before"),
    (read_conll, "-DOCSTART- O\n\n", " must hold a sentence. Received: none"),
    (read_conll, "\xff O\n", " must be UTF-8"),
    (read_conll, None, " must exist. Received: no such file"),
    # SQuAD
    (
        squad_of,
        '{"data": [\n  {]}',
        " must be JSON. Received: Expecting property name enclosed in double quotes: line 2 column 4",
    ),
    (squad_of, "[]", " must hold a JSON object. Received: list"),
    (squad_of, '{"date": []}', ": must have 'data'. Received: date"),
    (squad_of, '{"data": [{"title": "x"}]}', "article 1: must have 'paragraphs'. Received: title"),
    (squad_of, '{"data": [{"paragraphs": 3}]}', "article 1: 'paragraphs' must be a list. Received: 3"),
    (squad_of, '{"data": [{"paragraphs": [{"qas": []}]}]}', "article 1, paragraph 1: must have 'context'"),
    (squad_of, question(id=7), "article 1, paragraph 1, question 1: 'id' must be text. Received: 7"),
    (squad_of, question(answers=[{"text": "x"}]), "question 1, answer 1: must have 'answer_start'."),
    (squad_of, question(is_impossible=1), "question 7: `is_impossible` must be true or false. Received: 1"),
    (squad_of, '{"data": []}', " must hold a question. Received: none"),
    (squad_of, "\xff", " must be UTF-8"),
    # Rows of texts
    (read_rows, "text\na\n\nb\n", "row 2: must not be blank. Received: ''."),
    (read_rows, '{"anchor": "a"}\n', " must have a column 'positive', or --columns must name another."),
    (read_rows, '{"text": "a"}\n{"text": " "}\n', "row 2: text must be a text. Received: ' '."),
    (read_rows, '{"text": "a"}\n{\n', "row 2: must be JSON, an object a line."),
    (read_rows, "[1]\n", "row 1: must be a JSON object."),
    (read_rows, "", " must have a row. Received: none."),
    (read_rows, "anchor,positive\nx,y\nhello, world,b\n", "row 2: must have 2 fields. Received: 3."),
    (read_rows, "anchor,anchor,positive\na,b,c\n", " must name each column once."),
    (read_rows, '{"text": "\\ud800"}\n', "row 1: text must be a text."),
    (read_rows, NEGATIVE, "row 2: negative must be in the first row, too."),
    (read_rows, "sentence1,sentence2,score\na,b,high\n", "row 1: the score must be a number."),
    (read_rows, "sentence1,sentence2\na,b\n", " must have a column 'score'"),
    (read_evaluation, "anchor,positive\na,b\n", " must have sentence1, sentence2 and score."),
    (read_evaluation, "sentence1,sentence2,score\na,b,1\nc,d,1\n", " must have two scores that differ."),
    # Labels, and their kinds
    (problem_of, "text,label\na,b\na,\n", "row 2: the label must not be empty. Received: ''."),
    (problem_of, "text,kind\na,b\n", " must have a column 'label', or --label_column must name another."),
    (problem_of, "text,label\na,b\na,c\na,3\n", "row 3: the label must be a word, as in most rows"),
    (problem_of, "text,label\na,1\na,2\na,x\n", "row 3: the label must be a number, as in most rows"),
    (problem_of, "text,label\na,b\na,b\n", " must have 2 or more different labels. Received: b."),
    (problem_of, 'text,label\na,b\na,"b\nc"\n', "row 2: the label must have neither tabs nor line ends."),
    (problem_of, labels(["a"], ["b"], "c"), "row 3: must have a list of labels, as most rows."),
    (problem_of, labels("a", ["b"], "c"), "row 2: must have one label, as most rows. Received: ('b',)."),
    (problem_of, labels([], []), " must have 1 or more different labels. Received: none."),
    (read_labels, labels("a", "c"), "row 2: the label must be one of a, b. Received: 'c'."),
    (read_labels, labels("a", ["b", "a"]), "row 2: must have one label. Received: 2."),
    (read_labels, labels("a", []), "row 2: must have one label. Received: 0."),
    (read_labels, labels("a", float("nan")), "row 2: the label must not be empty. Received: nan."),
    (read_labels, labels("a", "\ud800"), "row 2: the label must be a text. Received: '\\ud800'."),
]


@pytest.mark.parametrize(("read", "content", "message"), MISTAKES)
def test_a_mistake_in_a_file_is_named(tmp_path, read, content, message):
    path = tmp_path / ("a.jsonl" if str(content)[:1] in ("{", "[") else "a.csv")
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError) as error:
        read(path)
    found = str(error.value)
    assert path.name in found and message in found and "\n" not in found


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("qrels/test.tsv", "", "qrels/test.tsv must have a score above 0."),
        ("qrels/test.tsv", "\n1\ta\tx\n", "qrels/test.tsv, line 2: must be query, document and score."),
        ("qrels/test.tsv", "\n1\td\t1\n", "test.tsv, line 2: corpus.jsonl must have it. Received: 'd'."),
        ("qrels/test.tsv", "1\ta\t1\n", "test.tsv must begin with a header. Received: '1\\ta\\t1'."),
        ("corpus.jsonl", 2 * '{"_id": "a", "text": "a"}\n', "row 2: each _id must be there once."),
    ],
)
def test_a_mistake_in_a_beir_folder_is_named(tmp_path, name, content, message):
    (write_beir(tmp_path) / name).write_text(content)
    with pytest.raises(InputError) as error:
        read_evaluation(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)
