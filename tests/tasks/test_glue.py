"""GLUE: files in their official form, cut as BERT cuts, files for its server, and models of other labels."""

import types

import numpy as np
import pytest

from bert_packed.core.settings import InputError
from bert_packed.tasks.classify.labels import NUMBER, SINGLE, Problem
from bert_packed.tasks.glue import task as glue
from bert_packed.tasks.glue.files import SERVER_NAMES, TASKS, read_glue, read_glue_test
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


# Logits of three examples, and what the server gets of them
PREDICTIONS = {
    "RTE": ([[1, 2], [5, 4], [0, 1]], ["not_entailment", "entailment", "not_entailment"]),
    "MNLI": ([[1, 2, 9], [5, 4, 1], [0, 1, 0.5]], ["contradiction", "entailment", "neutral"]),
    "CoLA": ([[1, 2], [5, 4], [0, 1]], ["1", "0", "1"]),
    "STS-B": ([[-0.25], [5.125], [4.0625]], ["0", "5", "4.0625"]),  # within the range of labels
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_servers_form(name, tmp_path):
    logits, labels = PREDICTIONS[name]
    task = TASKS[name]
    names = task.test_columns or task.columns[:-1]
    rows = ["\t".join(("index", *names)), *("\t".join((index, *["a"] * len(names))) for index in "407")]
    (tmp_path / "test.tsv").write_text("".join(f"{row}\n" for row in rows))
    file = glue._test_file(task, tmp_path / "test.tsv", "answers.tsv")
    assert file.score is None
    file.write(np.array(logits, np.float32), tmp_path)
    pairs = zip("407", labels, strict=True)
    lines = ["index\tprediction", *(f"{index}\t{label}" for index, label in pairs)]
    assert (tmp_path / "answers.tsv").read_text() == "".join(f"{line}\n" for line in lines)


def test_numbers_of_a_dev_file_stay_as_they_are(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\nc\td\t5\n")
    logits = np.array([[2.5], [6]], np.float32)
    file = glue._dev_file(TASKS["STS-B"], tmp_path / "dev.tsv", "predictions.tsv")
    file.write(logits, tmp_path)
    assert (tmp_path / "predictions.tsv").read_text() == "index\tprediction\n0\t2.5\n1\t6\n"
    assert file.score(logits) == pytest.approx({"pearson": 1, "spearman": 1})


def test_scores_of_a_part_have_its_ending(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tgold_label\na\tb\tneutral\nc\td\tneutral\n")
    file = glue._dev_file(TASKS["MNLI"], tmp_path / "dev.tsv", "predictions_matched.tsv")
    assert file.score(np.array([[0, 1, 0], [1, 0, 0]])) == {"accuracy_matched": 0.5}


OTHER_ORDER = "contradiction", "entailment", "neutral"
STORED = [
    ("MNLI", Problem(SINGLE, OTHER_ORDER), "labels in the order entailment, neutral"),
    ("RTE", Problem(SINGLE, TASKS["RTE"].classes, num_texts=1), "`data_dir` must have single texts"),
    ("STS-B", Problem(NUMBER, is_chance=True), "the numbers of STS-B. Received: m, of a chance."),
]


@pytest.mark.parametrize(("name", "stored", "message"), STORED)
def test_a_model_of_other_labels_is_refused(name, stored, message, monkeypatch):
    monkeypatch.setattr(glue, "stored_problem", lambda *_: stored)
    with pytest.raises(InputError, match=message):
        glue._check_labels(types.SimpleNamespace(init_checkpoint="m"), TASKS[name])


def test_labels_of_other_names_are_told(monkeypatch, capsys):
    config = types.SimpleNamespace(init_checkpoint="m")
    for names, told in ((("different", "equivalent"), True), (("0", "1"), False)):
        monkeypatch.setattr(glue, "stored_problem", lambda *_, names=names: Problem(SINGLE, names))
        glue._check_labels(config, TASKS["MRPC"])
        assert (
            "different, equivalent of init_checkpoint are taken for 0, 1" in capsys.readouterr().out
        ) == told
