"""The task `embed`: files of texts, runs, scores, and folders that sentence-transformers opens.

The faults that this file alone catches: a row that is lost or mixed up between file and step, a prefix or
pooling that training and export disagree on, scores by another definition.
"""

import json
import shutil

import numpy as np
import pytest
from encoder_files import WORDS, write_beir, write_encoder, write_json_lines
from recorded_calls import assert_refused
from scipy.stats import spearmanr

import bert_packed
from bert_packed import cli
from bert_packed.checkpoints.sentence_transformers import VectorSettings, write_settings
from bert_packed.core.settings import InputError
from bert_packed.runs.vocabulary import find_vector_settings
from bert_packed.tasks.embed.config import EmbedConfig
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.embed.scores import read_evaluation
from bert_packed.tasks.retrieval import Retrieval

LENGTH = 24
PAIRS = [(" ".join(WORDS[i : i + 4]), " ".join(WORDS[i + 2 : i + 5])) for i in range(12)]
SCORED = [(one, PAIRS[(3 * i + 1) % 12][1], i % 5) for i, (one, _) in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pairs, scored pairs, texts alone, and models to start from: `vectors` has a default prompt."""
    folder = tmp_path_factory.mktemp("files")
    write_encoder(folder / "start")
    shutil.copytree(folder / "start", folder / "vectors")
    write_settings(folder / "vectors", VectorSettings(prompts={"query": "w1"}), 16)
    (folder / "vectors" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    prompts = {"prompts": {"query": "w1"}, "default_prompt_name": "query"}
    (folder / "vectors" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    write_json_lines(folder / "pairs.jsonl", ("anchor", "positive"), PAIRS)
    write_json_lines(folder / "scored.jsonl", ("sentence1", "sentence2", "score"), SCORED)
    write_json_lines(folder / "texts.jsonl", ("text",), [(one,) for one, _ in PAIRS])
    return folder


def flags(files, output_dir, **changes):
    return {
        "train_file": str(files / "pairs.jsonl"),
        "init_checkpoint": str(files / "start"),
        "output_dir": str(output_dir),
        "max_seq_length": LENGTH,
        "train_batch_size": 4,
        "learning_rate": 0.01,
        "log_steps": 1,
        **changes,
    }


def scored_flags(files, output_dir, **changes):
    scored = {"eval_file": str(files / "scored.jsonl"), "eval_steps": 2, "keep_best": True}
    return flags(files, output_dir, num_train_epochs=2.0, **scored, **changes)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", ["pairs", "scored", "texts"])
def test_a_run_leaves_a_folder_with_its_vectors(files, tmp_path, kind):
    """And the weights with the best score."""
    more = {"query_prefix": "w25 w24 ", "passage_prefix": "w23 "} if kind == "pairs" else {"pooling": "cls"}
    more |= {"train_file": str(files / f"{kind}.jsonl")}
    more |= {"hidden_dropout_prob": 0.1} if kind == "texts" else {}
    result = bert_packed.finetune(EmbedConfig(**scored_flags(files, tmp_path / "run", **more)))
    rows = (tmp_path / "run" / "eval_metrics.csv").read_text().splitlines()
    scores = [float(row.split(",")[1]) for row in rows[1:]]
    assert rows[0] == "step,spearman" and [row.split(",")[0] for row in rows[1:]] == ["0", "2", "4", "6"]
    assert result.scores == {"spearman": pytest.approx(max(scores))}
    encoder = bert_packed.load_encoder(tmp_path / "run" / "model", batch_size=2)
    assert find_vector_settings(tmp_path / "run", True) == encoder.settings
    pooling = "mean" if kind == "pairs" else "cls"
    assert (encoder.settings.pooling, encoder.settings.normalize) == (pooling, True)
    one, other = (encoder.encode([row[place] for row in SCORED]) for place in (0, 1))
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-5)
    cosines = np.diag(bert_packed.similarity(one, other))
    # The score is that of the folder's vectors
    found = 100 * spearmanr(cosines, [row[2] for row in SCORED]).statistic
    assert found == pytest.approx(max(scores), abs=1e-3)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"On {files}/scored.jsonl: pairs 12:" in card
    assert 'SentenceTransformer("FOLDER_OR_NAME")' in card
    if kind == "pairs":
        assert encoder.settings.prompts["query"] == "w25 w24 "
        want = encoder.encode([f"w25 w24 {text}" for text, _ in PAIRS])
        np.testing.assert_array_equal(encoder.encode([text for text, _ in PAIRS], prompt="query"), want)


def test_rows_of_every_form(tmp_path):
    """Columns by name, in any order; quotes are text in TSV alone."""
    texts = [('say "a", b', "c"), ("d", "e")]
    path = tmp_path / "rows.csv"
    path.write_text('positive,anchor\nc,"say ""a"", b"\ne,d\n')
    assert list(zip(*read_rows(path).texts, strict=True)) == texts
    (tmp_path / "rows.tsv").write_text('anchor\tpositive\nsay "a", b\tc\nd\te\n')
    assert list(zip(*read_rows(tmp_path / "rows.tsv").texts, strict=True)) == texts
    write_json_lines(tmp_path / "rows.jsonl", ("q", "p", "gain"), [(*row, 1) for row in texts])
    found = read_rows(tmp_path / "rows.jsonl", "q,p", "gain")
    assert list(zip(*found.texts, strict=True)) == texts and found.scores.tolist() == [1, 1]
    pyarrow = pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
    from pyarrow import parquet

    table = pyarrow.table({"anchor": [one for one, _ in texts], "positive": [two for _, two in texts]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "saved").mkdir()
    with pyarrow.ipc.new_stream(str(tmp_path / "saved" / "data-0.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("rows.parquet", "saved"):
        assert list(zip(*read_rows(tmp_path / name).texts, strict=True)) == texts
    with pytest.raises(InputError, match=r"must end in .jsonl, .* or be a folder. Received: '.txt'"):
        read_rows(tmp_path / "rows.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "cosent", "both_directions": True}, "`both_directions` must be false for loss=cosent."),
        ({"do_train": False, "eval_file": "{files}/scored.jsonl", "keep_best": True}, "`keep_best` must be"),
        ({"matryoshka_widths": "8,x"}, "empty or comma-separated numbers of dimensions"),
        ({"matryoshka_widths": "99"}, "`matryoshka_widths` must be at most hidden_size=16. Received: 99."),
        *(
            ({"train_file": "{files}/scored.jsonl", name: "w1"}, f"`{name}` must be left out for pairs with")
            for name in ("query_prefix", "passage_prefix")
        ),
        (
            {"init_checkpoint": "{files}/vectors", "do_lower_case": False},
            "`do_lower_case` must be true, and the tokens WordPieces, by {files}/vectors/sentence_bert",
        ),
        (
            {"init_checkpoint": "{files}/vectors"},
            "`init_checkpoint` must have no default_prompt_name, as texts are trained without. Received:",
        ),
        ({"loss": "cosent"}, "must have a score of each pair for loss=cosent. Received: none."),
    ],
)
def test_a_mistake_in_a_call_is_one_line(files, tmp_path, changes, message):
    changes = {k: v.format(files=files) if isinstance(v, str) else v for k, v in changes.items()}
    message = message.format(files=files)
    assert_refused(cli.fine_tune, EmbedConfig, message, **flags(files, tmp_path / "run", **changes))


def test_folders_of_others_are_kept(files, tmp_path):
    """A folder that is named as a result, without a run beside it; and a model without training."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "mine.bin").touch()
    without_training = {"do_train": False, "eval_file": str(files / "scored.jsonl")}
    for change, message in (
        ({}, "`output_dir` must be empty or hold this run"),
        (without_training, "`output_dir` must hold no model unless --do_train"),
    ):
        assert_refused(cli.fine_tune, EmbedConfig, message, **flags(files, tmp_path / "run", **change))
    assert (tmp_path / "run" / "model" / "mine.bin").exists()


@pytest.mark.usefixtures("uncompiled")
def test_a_run_goes_on_and_is_scored_again(files, tmp_path):
    """Stopped in the middle, by a file of fewer epochs; then by another file of scores."""
    given = scored_flags(files, tmp_path / "run", save_checkpoints_steps=2, keep_checkpoint_max=9)
    whole = bert_packed.finetune(EmbedConfig(**given)).scores
    rows = (tmp_path / "run" / "eval_metrics.csv").read_text()
    weights = (tmp_path / "run" / "checkpoint-6" / "model.safetensors").read_bytes()
    assert whole["spearman"] == pytest.approx(max(float(row.split(",")[1]) for row in rows.split()[1:]))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    assert bert_packed.finetune(EmbedConfig(**given)).scores == pytest.approx(whole)
    assert (tmp_path / "run" / "eval_metrics.csv").read_text() == rows
    assert (tmp_path / "run" / "checkpoint-6" / "model.safetensors").read_bytes() == weights
    write_json_lines(tmp_path / "other.jsonl", ("sentence1", "sentence2", "score"), SCORED[::-2])
    scores = bert_packed.finetune(EmbedConfig(**{**given, "eval_file": str(tmp_path / "other.jsonl")})).scores
    assert scores != pytest.approx(whole)


def test_ranks_of_documents(tmp_path):
    """By hand: the first query finds gains 2, 0, 1, the second 0, 0, 1."""
    found = read_evaluation(write_beir(tmp_path))
    assert found.description == f"{tmp_path}/qrels/test.tsv: queries 2, documents 3"
    vectors = {"a": [1, 0.2], "b": [0.9, 0.4], "c": [0.5, 0.5]}
    queries = {"a": [1, 0], "b": [0.1, 1]}

    def encode(texts, is_query):
        assert is_query == (texts != ["a", "b", "c"])
        return np.array([(queries if is_query else vectors)[text] for text in texts])

    first, second = (2 + 1 / 2) / (2 + 1 / np.log2(3)), 1 / np.log2(3)
    want = {"ndcg@10": 50 * (first + second), "mrr@10": 100 * (1 + 1 / 2) / 2}
    assert found.score(encode) == pytest.approx({**want, "recall@10": 100, "recall@100": 100})


def test_a_query_that_is_a_document_does_not_find_itself():
    found = Retrieval("", {"a": "x", "b": "y"}, {"a": "x"}, {"a": {"b": 1}})
    assert found.best("a", ["a", "b"], np.array([2, 1])) == ["b"]
    assert found.best("a", ["b"], np.array([1])) == ["b"]  # nor is it among its candidates


@pytest.mark.parametrize(
    ("names", "given", "want"),
    [
        (("dev", "test", "train"), "", "dev"),  # which may choose a checkpoint
        (("test", "train"), "", "test"),
        (("train",), "", "train"),
        (("dev", "test"), "qrels/test.tsv", "test"),
    ],
)
def test_qrels_of_a_folder(tmp_path, names, given, want):
    qrels = write_beir(tmp_path) / "qrels"
    content = (qrels / "test.tsv").read_text()
    (qrels / "test.tsv").unlink()
    for name in names:
        (qrels / f"{name}.tsv").write_text(content)
    assert read_evaluation(tmp_path / given).files[0] == str(qrels / f"{want}.tsv")
