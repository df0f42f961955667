"""GLUE files: read in their official form, cut as BERT cuts."""

import pytest

from bert_packed.core.settings import InputError
from bert_packed.tasks.glue.files import (
    SERVER_NAMES,
    TASKS,
    read_glue,
    read_glue_test,
)
from bert_packed.tasks.rows import cut_sizes, make_text_sequences
from bert_packed.text import tokenization

FILES = {
    "CoLA": (
        'gj04\t1\t\tThe "cat sat.\ngj04\t0\t*\tCat the sat.\n',
        [1, 0],
        [['The "cat sat.', "Cat the sat."]],
    ),
    "SST-2": ('sentence\tlabel\na "b \t1\nc \t0\n', [1, 0], [['a "b ', "c "]]),
    "MRPC": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n0\t7\t8\tc\t"d\n',
        [1, 0],
        [["a", "c"], ["b", '"d']],
    ),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\tc\td\tentailment\n",
        [1, 0],
        [["a", "c"], ["b", "d"]],
    ),
    "STS-B": (
        "index\tgenre\tsentence1\tsentence2\tscore\n0\tg\ta\tb\t2.5\n1\tg\tc\td\t5.000\n",
        [2.5, 5.0],
        [["a", "c"], ["b", "d"]],
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        "7\t1\t2\ta\tb\t1\n8\t3\t4\tc torn\nin two\tx\t1\n9\t5\t6\tc\td\t0\n",
        [1, 0],
        [["a", "c"], ["b", "d"]],
    ),
    "MNLI": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t1\t1n\tslate\t( a )\t( b )\t(ROOT a)\t(ROOT b)\ta\tb\tentailment\tneutral\n"
        "1\t2\t2c\tslate\t( c )\t( d )\t(ROOT c)\t(ROOT d)\tc\td\tneutral\tcontradiction\n"
        "2\t3\t3e\tslate\t( e )\t( f )\t(ROOT e)\t(ROOT f)\te\tf\tneutral\tentailment\n",
        [1, 2, 0],
        [["a", "c", "e"], ["b", "d", "f"]],
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel\n0\ta?\tb\tnot_entailment\n1\tc?\td\tentailment\n",
        [1, 0],
        [["a?", "c?"], ["b", "d"]],
    ),
}
TEST_FILES = {  # without labels, an index first; CoLA has a header here
    "CoLA": ('index\tsentence\n0\ta "b\n1\tc\n', [['a "b', "c"]]),
    "MRPC": (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\ta\tb\n1\t7\t8\tc\td\n",
        [["a", "c"], ["b", "d"]],
    ),
    "QQP": ("id\tquestion1\tquestion2\n0\ta\tb\n1\tc\td\n", [["a", "c"], ["b", "d"]]),
    "QNLI": ("index\tquestion\tsentence\n0\ta\tb\n1\tc\td\n", [["a", "c"], ["b", "d"]]),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path, name):
    text, labels, texts = FILES[name]
    path = tmp_path / "train.tsv"
    path.write_bytes(text.encode())
    found = read_glue(path, TASKS[name])
    assert TASKS[name].problem.numbers(found).tolist() == labels
    assert found.texts == texts
    assert found.num_torn == (2 if name == "QQP" else 0)


@pytest.mark.parametrize("name", TEST_FILES)
def test_test_files(tmp_path, name):
    text, texts = TEST_FILES[name]
    path = tmp_path / "test.tsv"
    path.write_text(text)
    found, indices = read_glue_test(path, TASKS[name])
    assert (indices, found.texts, found.labels) == (["0", "1"], texts, None)
    path.write_text(text.replace("\n1\t", "\n0\t"))
    with pytest.raises(InputError, match=r"line 3: the first column must be a whole number, each once"):
        read_glue_test(path, TASKS[name])
    path.write_text(text + "2\n")  # which QQP may have in training alone: the server counts the lines
    with pytest.raises(InputError, match=r"line 4: must have at least \d columns"):
        read_glue_test(path, TASKS[name])


def test_the_servers_files(tmp_path):
    """By the names of GLUE's own example of a submission."""
    names = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm AX QNLI RTE WNLI"
    assert sorted(SERVER_NAMES) == sorted(names.split())
    mnli = TASKS["MNLI"].test_files(tmp_path / "MNLI")
    assert [path.name for path in mnli.values()] == ["test_matched.tsv", "test_mismatched.tsv"]
    (tmp_path / "diagnostic").mkdir()
    (tmp_path / "diagnostic" / "diagnostic.tsv").touch()
    (tmp_path / "MNLI").mkdir()
    assert list(TASKS["MNLI"].test_files(tmp_path / "MNLI")) == ["MNLI-m", "MNLI-mm", "AX"]


def test_pairs_lose_the_end_of_the_longer_text():
    assert cut_sizes([5, 9], 8) == [4, 4]
    assert cut_sizes([9, 2], 8) == [6, 2]
    assert cut_sizes([2, 3], 8) == [2, 3]
    assert cut_sizes([4, 4], 7) == [4, 3]
    assert cut_sizes([9], 7) == [7]


def test_sequences():
    vocabulary = tokenization.Vocabulary((*tokenization.SPECIAL_TOKENS, "a", "b", "c"))
    tokenizer = tokenization.make_text_tokenizer(vocabulary, True)
    cls, sep, a, b = 2, 3, 5, 6
    pair, num_cut = make_text_sequences([["a a", "a"], ["b", "b b b b"]], tokenizer, 7)
    assert num_cut == 1
    assert pair["tokens"].tolist() == [cls, a, a, sep, b, sep, cls, a, sep, b, b, b, sep]
    assert pair["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert pair["lengths"].tolist() == [6, 7]
    single, num_cut = make_text_sequences([["a b", ""]], tokenizer, 8)
    assert (single["tokens"].tolist(), num_cut) == ([cls, a, b, sep, cls, sep], 0)
    full, num_cut = make_text_sequences([["a b", "a b a"]], tokenizer, 4)  # as many as fit
    assert (full["tokens"].tolist(), num_cut) == ([cls, a, b, sep, cls, a, b, sep], 1)
