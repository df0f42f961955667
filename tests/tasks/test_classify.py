"""The task `classify`: labels of files, runs, scores, predictions, and folders that transformers opens.

The faults that this file alone catches: a label of another row, labels of the wrong kind, an exported head
whose labels are in another order, a run that ends early and then goes on.
"""

import csv
import dataclasses
import importlib.util
import itertools
import json
import shutil

import numpy as np
import pytest
from encoder_files import WORDS, write_beir, write_encoder
from recorded_calls import assert_refused
from sklearn import metrics
from tiny import SHALLOW

import bert_packed
from bert_packed import cli
from bert_packed.core.settings import InputError
from bert_packed.tasks.classify import scores
from bert_packed.tasks.classify.config import ClassifyConfig
from bert_packed.tasks.classify.inference import TextClassifier
from bert_packed.tasks.classify.labels import (
    NUMBER,
    SEVERAL,
    SINGLE,
    Problem,
    find_problem,
    read_examples,
    weights_of,
)

CLASSES = ["art", "biology", "chess", "dance", "earth", "film", "golf"]
LENGTH = 24
RERANKER = "reranker"  # a number of a pair, a chance


def rows_of(kind, number, seed):
    """Texts whose first words are their label."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        topics = rng.choice(7, 2, replace=False).tolist()
        words = [WORDS[7 + place] for place in rng.integers(0, 19, rng.integers(1, 8))]
        firsts = [WORDS[topic] for topic in topics[: 1 + (kind == SEVERAL)]]
        label = {SINGLE: CLASSES[topics[0]], SEVERAL: "|".join(CLASSES[t] for t in topics)}
        label |= {NUMBER: str(topics[0] / 2), RERANKER: str(int(topics[0] > 3))}
        pair = [words[0]] if kind == RERANKER else []
        found.append((*pair, " ".join([*firsts, *words]), label[kind]))
    return found


def write_csv(path, rows):
    names = ("text",) if len(rows[0]) == 2 else ("sentence1", "sentence2")
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([(*names, "label"), *rows])
    return str(path)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("start"), SHALLOW)


def config_of(folder, kind, start, **changes):
    files = {name: write_csv(folder / f"{name}.csv", rows_of(kind, n, n)) for name, n in SIZES.items()}
    return ClassifyConfig(
        **{
            "train_file": files["train"],
            "eval_file": files["dev"],
            "init_checkpoint": str(start),
            "output_dir": str(folder / "run"),
            "max_seq_length": LENGTH,
            "train_batch_size": 16,
            "learning_rate": 0.03,
            "num_train_epochs": 12.0,
            "label_separator": "|" if kind == SEVERAL else "",
            "number_loss": "binary" if kind == RERANKER else "squared",
            **changes,
        }
    )


SIZES = {"train": 64, "dev": 24}
LEARNED = {
    SINGLE: ("accuracy", 90),
    SEVERAL: ("f1_micro", 50),
    NUMBER: ("spearman", 70),
    RERANKER: ("pearson", 70),
}


def check_others(folder, kind, texts, chances):
    """The folder's probabilities are those of the libraries that open it, where they are installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if kind == RERANKER:
        want, got = CrossEncoder(str(folder), device="cpu").predict(texts), chances[:, 0]
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**tokens).logits
        applied = {SINGLE: logits.softmax(dim=-1), SEVERAL: logits.sigmoid(), NUMBER: logits}
        want, got = applied[kind].numpy(), chances
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", LEARNED)
def test_a_run_learns_labels_and_leaves_a_folder(tmp_path, start, kind):
    config = config_of(tmp_path, kind, start, eval_steps=24)
    result, folder = bert_packed.finetune(config), tmp_path / "run"
    name, least = LEARNED[kind]
    problem_type = NUMBER if kind == RERANKER else kind
    assert tuple(result.scores) == scores.NAMES[problem_type] and result.scores[name] > least
    assert json.loads((folder / "eval_results.json").read_text()) == result.scores
    header, *lines = [line.split("\t") for line in (folder / "predictions.tsv").read_text().splitlines()]
    content = json.loads((folder / "model" / "config.json").read_text())
    assert content["problem_type"] == problem_type
    *texts, true = zip(*rows_of(kind, 24, 24), strict=True)
    texts = list(zip(*texts, strict=True)) if kind == RERANKER else list(texts[0])
    if problem_type == NUMBER:
        assert header == ["prediction"] and not (folder / "labels.txt").exists()
    else:
        assert header == ["prediction", *CLASSES] == ["prediction", *content["id2label"].values()]
        assert (folder / "labels.txt").read_text().split() == CLASSES
    if kind == SINGLE:
        # Every row's prediction is in the row's place
        assert np.mean([line[0] == label for line, label in zip(lines, true, strict=True)]) > 0.9
        table = np.array(json.loads((folder / "confusion.json").read_text())["true_by_predicted"])
        assert table.sum() == 24 and table.trace() / 24 == pytest.approx(result.scores["accuracy"] / 100)
    # The folder gives the same predictions from Python, and the same scores, whose names and kind it knows
    classifier = bert_packed.load_classifier(folder / "model")
    labels, chances = classifier.predict(texts)
    if problem_type == NUMBER:
        assert classifier.names == () and chances[:, 0].tolist() == labels
        np.testing.assert_allclose(labels, [float(line[0]) for line in lines], rtol=1e-4)
    else:
        assert ["|".join(one) if kind == SEVERAL else one for one in labels] == [line[0] for line in lines]
        np.testing.assert_allclose(chances, [list(map(float, line[1:])) for line in lines], atol=1e-5)
    check_others(folder / "model", kind, texts, chances)
    again = ClassifyConfig(
        do_train=False,
        init_checkpoint=str(folder / "model"),
        eval_file=config.eval_file,
        label_separator=config.label_separator,
        output_dir=str(tmp_path / "again"),
        max_seq_length=LENGTH,
    )
    assert bert_packed.finetune(again).scores == pytest.approx(result.scores, abs=1e-3)


@pytest.mark.usefixtures("uncompiled")
def test_a_run_that_ends_early_is_over(tmp_path, start, capsys):
    """Also where it was killed before it knew, or goes on without a file to score."""
    changes = {"eval_steps": 2, "keep_best": True, "early_stopping_patience": 2, "best_score": "matthews"}
    config = config_of(tmp_path, SINGLE, start, learning_rate=0.0, **changes)
    first = bert_packed.finetune(config)
    assert "no better matthews in 2 evaluations" in capsys.readouterr().out
    rows = (tmp_path / "run" / "eval_metrics.csv").read_text().splitlines()
    assert rows[0].startswith("step,matthews,") and [row.split(",")[0] for row in rows[1:]] == ["2", "4", "6"]
    assert bert_packed.finetune(config).scores == first.scores
    assert (tmp_path / "run" / "eval_metrics.csv").read_text().splitlines() == rows
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert bert_packed.finetune(config).scores == first.scores
    assert (tmp_path / "run" / "eval_metrics.csv").read_text().splitlines() == rows
    write_csv(tmp_path / "dev.csv", rows_of(SINGLE, 10, 3))
    with pytest.raises(InputError, match="eval_file"):
        bert_packed.finetune(config)


@pytest.mark.usefixtures("uncompiled")
def test_the_best_weights_and_a_start_of_other_labels(tmp_path, start, capsys, monkeypatch):
    """Each score is worse than the one before, so that the first weights are the best and not the last."""
    falling = itertools.count(100, -1)
    monkeypatch.setattr(scores, "score", lambda *_: dict.fromkeys(scores.NAMES[SINGLE], float(next(falling))))
    config = config_of(tmp_path, SINGLE, start, eval_steps=4, keep_best=True, num_train_epochs=3.0)
    bert_packed.finetune(config)
    texts = [text for text, _ in rows_of(SINGLE, 24, 24)]
    run, vocabulary = tmp_path / "run", str(start / "vocab.txt")
    given, best, last = (
        bert_packed.load_classifier(folder, vocabulary).predict(texts).probabilities
        for folder in (run / "model", run / "best", run)
    )
    np.testing.assert_allclose(given, best, atol=1e-6)
    assert np.abs(given - last).max() > 0.1
    capsys.readouterr()
    rows = [(text, "zoo" if label == "art" else label) for text, label in rows_of(SINGLE, 40, 5)]
    other = dataclasses.replace(
        config,
        train_file=write_csv(tmp_path / "other.csv", rows),
        init_checkpoint=str(tmp_path / "run" / "model"),
        eval_file="",
        eval_steps=0,
        keep_best=False,
        num_train_epochs=1.0,
        output_dir=str(tmp_path / "other"),
    )
    bert_packed.finetune(other)
    out = capsys.readouterr().out
    assert "head       has new weights" in out
    assert "initial values kept: classification/classifier/kernel" in out
    single = bert_packed.load_classifier(tmp_path / "other")
    assert single.names == tuple(sorted({*CLASSES[1:], "zoo"}))


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_reranker_is_scored_by_the_documents_that_it_ranks(tmp_path, start):
    """As sentence-transformers scores the exported folder."""
    rows = rows_of(RERANKER, 30, 7)
    texts, queries = sorted({text for _, text, _ in rows}), [word for word, _, _ in rows[:4]]
    good = [text for text in texts if int(text.split()[0][1:]) > 3]
    relevant = [(str(n), text, 1) for n in range(1, 5) for text in good[n::3]]
    beir = write_beir(tmp_path / "beir", texts, queries, relevant)
    config = config_of(tmp_path, RERANKER, start, eval_file=str(beir), num_train_epochs=2.0, keep_best=True)
    result = bert_packed.finetune(config)
    assert tuple(result.scores) == ("ndcg@10", "mrr@10", "recall@10", "recall@100")
    ranking = (tmp_path / "run" / "ranking.tsv").read_text().splitlines()
    header, *lines = [line.split("\t") for line in ranking]
    assert header == ["query-id", "corpus-id", "score"] and len(lines) == 4 * len(texts)
    scores = [float(score) for query, _, score in lines if query == "2"]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 20
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import CrossEncoder
        from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

        model = CrossEncoder(str(tmp_path / "run" / "model"), device="cpu", activation_fn=None)
        samples = []
        for number, query in enumerate(queries, 1):
            positive = [text for own, text, _ in relevant if own == str(number)]
            negative = [text for text in texts if text not in positive]
            samples.append({"query": query, "positive": positive, "negative": negative})
        want = CrossEncoderRerankingEvaluator(samples, write_csv=False)(model)
        for name in ("ndcg@10", "mrr@10"):
            assert result.scores[name] == pytest.approx(100 * want[name], abs=1e-6)


def examples(tmp_path, labels, **options):
    rows = [{"text": "a", "label": label} for label in labels]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(path, **options)


@pytest.mark.parametrize(
    ("labels", "options", "kind", "names", "numbers"),
    [
        (["b", "a", "b"], {}, SINGLE, ("a", "b"), [1, 0, 1]),
        (["10", "9", "-1"], {}, SINGLE, ("-1", "9", "10"), [2, 1, 0]),
        ([True, False], {}, SINGLE, ("false", "true"), [1, 0]),
        (["+1", "-1.0"], {}, SINGLE, ("-1", "1"), [1, 0]),
        (["0.5", "2", "-1e2"], {}, NUMBER, (), [0.5, 2, -100]),
        ([["b"], [], ["a", "b"]], {}, SEVERAL, ("a", "b"), [[0, 1], [0, 0], [1, 1]]),
        (["b; a", "c"], {"separator": ";"}, SEVERAL, ("a", "b", "c"), [[1, 1, 0], [0, 0, 1]]),
    ],
)
def test_labels_are_recognised_sorted_and_numbered(tmp_path, labels, options, kind, names, numbers):
    found = examples(tmp_path, labels, **options)
    problem = find_problem(found)
    assert problem == Problem(kind, names) and problem.numbers(found).tolist() == numbers


SETTINGS = [
    ({"train_file": ""}, "`train_file` must be given unless --do_train=false."),
    ({"eval_file": "no"}, "`eval_file` must be an existing file or folder. Received: no."),
    ({"candidates_file": "no"}, "`candidates_file` must be an existing file. Received: no."),
    ({"candidates_file": __file__}, "`candidates_file` must be left out without a folder in BEIR's form"),
    ({"predict_file": "no"}, "`predict_file` must be an existing file or folder. Received: no."),
    ({"eval_file": "", "eval_steps": 3}, "`eval_steps` must be left out without eval_file. Received: 3."),
    ({"early_stopping_patience": 1}, "`early_stopping_patience` must be 0 without eval_steps. Received: 1."),
    ({"class_weights": "a=0"}, "`class_weights` must be empty, balanced, or labels with weights above 0"),
    ({"label_separator": ",", "problem_type": SINGLE}, "`label_separator` must be left out for"),
    ({"problem_type": NUMBER, "class_weights": "balanced"}, "`class_weights` must be left out for"),
    ({"class_weights": "x=2"}, "`class_weights` must name classes, art, biology, chess"),
    ({"number_loss": "binary", "problem_type": SINGLE}, "`number_loss` must be left out for"),
    ({"number_loss": "binary"}, "row 1: the label must be a number from 0 to 1. Received: "),
    ({"class_weights": "art=2,art=3"}, "`class_weights` must name each class once."),
    ({"do_train": False, "eval_file": ""}, "`eval_file` or `predict_file` must be given unless --do_train."),
    ({"do_train": False, "eval_steps": 2}, "`eval_steps` must be left out unless --do_train. Received: 2."),
    ({"do_train": False}, "`init_checkpoint` must be fine-tuned to classify. Received: "),
    ({"best_score": "f1"}, "`best_score` must be one of accuracy, f1_macro, f1_weighted, matthews."),
]


@pytest.mark.parametrize(("changes", "message"), SETTINGS)
def test_settings_that_cannot_be(tmp_path, start, changes, message):
    config = config_of(tmp_path, SINGLE, start)
    names = ("train_file", "eval_file", "init_checkpoint", "output_dir", "max_seq_length")
    flags = {**{name: getattr(config, name) for name in names}, **changes}
    assert_refused(cli.fine_tune, ClassifyConfig, message, **flags)


def test_labels_of_the_dev_file_are_checked_before_training(tmp_path, start):
    config = config_of(tmp_path, SINGLE, start)
    write_csv(tmp_path / "dev.csv", [("w1 w2", "art"), ("w3", "opera")])
    with pytest.raises(InputError, match=r"dev.csv, row 2: the label must be one of art, .*'opera'"):
        bert_packed.finetune(config)
    assert not (tmp_path / "run").exists()


def test_weights_of_classes():
    problem, labels = Problem(SINGLE, ("a", "b")), np.array([0, 0, 0, 1])
    # Every class has the same sum, and the weights' mean over examples is 1, as in scikit-learn
    np.testing.assert_allclose(weights_of("balanced", problem, labels), [4 / 6, 2])
    assert weights_of("b=3", problem, labels).tolist() == [1, 3] and weights_of("", problem, labels) is None


def test_scores_by_hand():
    """Of labels that are never true or predicted, and of constants."""
    true, found = np.array([0, 0, 1]), np.array([[2, 1, 0], [1, 2, 0], [1, 2, 0]])
    got = scores.score(Problem(SINGLE), found, true)
    assert got["accuracy"] == pytest.approx(2 / 3) and got["f1_macro"] == pytest.approx(2 / 3)
    assert got["matthews"] == pytest.approx(0.5)
    bits, logits = np.array([[1, 0, 0], [0, 1, 0]], np.float32), np.array([[2, 0.5, -2], [1.5, 1, -1]])
    several = scores.score(Problem(SEVERAL), logits, bits)
    # The first label is always right, the second predicted, the third neither true nor predicted
    assert several["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 2)) and several["average_precision"] == 1
    assert several["f1_macro"] == pytest.approx(2 / 3)
    assert scores.score(Problem(SEVERAL), -np.ones((4, 1)), np.array([[1], [0], [0], [0]]))["f1_micro"] == 0
    assert scores.score(Problem(NUMBER), np.ones((3, 1)), np.arange(3.0)) == {"pearson": 0, "spearman": 0}
    assert metrics.f1_score(true, found.argmax(1), average="weighted") == got["f1_weighted"]


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
