"""The task `embed` beside sentence-transformers: its losses and gradients, and its vectors of our folders.

The fault that this file alone catches: an export, a prompt or a loss that means something else elsewhere.
"""

import functools
import json
import types
import warnings

import numpy as np
import pytest
from encoder_files import WORDS, write_encoder
from keras import ops
from reference import import_reference

import bert_packed
from bert_packed.architectures.bert.checkpoint_names import tensor_names
from bert_packed.assembly.update_packs import plan_row_updates
from bert_packed.checkpoints import starting_weights
from bert_packed.tasks import run
from bert_packed.tasks.batches import train_batches
from bert_packed.tasks.embed import task
from bert_packed.tasks.embed.config import EmbedConfig
from bert_packed.tasks.embed.files import read_rows
from bert_packed.tasks.embed.losses import embedding_objective
from bert_packed.tasks.embed.scores import read_evaluation
from bert_packed.training import engines
from bert_packed.training.backend import compiled
from bert_packed.training.engines.engine import named_weights

LENGTH = 24


@pytest.fixture(scope="module", autouse=True)
def package():
    """sentence-transformers, imported before TensorFlow computes: afterwards torch's compiler crashes it."""
    import_reference()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        found = pytest.importorskip("sentence_transformers", reason="pip install -e '.[reference]'")
    return found


def config_of(folder, rows, **more):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EmbedConfig(
        train_file=str(folder / "rows.jsonl"),
        init_checkpoint=str(folder / "start"),
        output_dir=str(folder / "run"),
        max_seq_length=LENGTH,
        train_batch_size=6,
        **more,
    )


@pytest.mark.usefixtures("uncompiled")
def test_vectors_are_those_of_sentence_transformers(package, tmp_path):
    """Prompts included."""
    more = {"query_prefix": "w1: ", "passage_prefix": "w2: ", "num_train_epochs": 1.0}
    write_encoder(tmp_path / "start")
    pairs = [
        {"anchor": " ".join(WORDS[i : i + 4]), "positive": " ".join(WORDS[i + 2 : i + 5])} for i in range(9)
    ]
    bert_packed.finetune(config_of(tmp_path, pairs, learning_rate=0.01, **more))
    theirs = package.SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    ours = bert_packed.load_encoder(tmp_path / "run" / "model")
    texts = [text for row in pairs for text in row.values()] + [" ".join(WORDS)]
    for prompt in ("query", "passage", None):
        want = theirs.encode(texts, prompt_name=prompt)
        np.testing.assert_allclose(ours.encode(texts, prompt=prompt or ""), want, atol=1e-6)
    found = bert_packed.similarity(want, want[:3])
    np.testing.assert_allclose(found, theirs.similarity(want, want[:3]).numpy(), atol=1e-5)


KINDS = {
    "MultipleNegativesRankingLoss": "ranking",
    "CachedMultipleNegativesRankingLoss": "ranking",
    "CoSENTLoss": "cosent",
    "MatryoshkaLoss": "ranking",  # all dimensions, 8 and 4
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_sentence_transformers(package, kind, tmp_path):
    """From one export's weights, on one step of rows of a file: loss, and gradients of all weights."""
    torch, _ = import_reference()
    losses = package.sentence_transformer.losses

    write_encoder(tmp_path / "start")
    words = [f"w{number}" for number in range(26)]
    rows = [
        {"anchor": words[i : i + 3], "positive": words[i + 1 : i + 6], "negative": words[20 - i :]}
        for i in range(6)
    ]
    rows = [{role: " ".join(text) for role, text in row.items()} for row in rows]
    if kind == "CoSENTLoss":
        names = ("sentence1", "sentence2")
        rows = [dict(zip(names, row.values(), strict=False), score=n * 5 % 4) for n, row in enumerate(rows)]
    widths = (16, 8, 4) if kind == "MatryoshkaLoss" else ()
    config = config_of(tmp_path, rows, learning_rate=0.0, matryoshka_widths=",".join(map(str, widths[1:])))
    bert_packed.finetune(config)
    read = read_rows(config.train_file)
    text = run.read_text_model(config)
    settings = task.vector_settings(config, text)
    data = task.training_data(config, read, text.tokenizer, settings)
    updates = plan_row_updates(data.sequences["lengths"], 1, 6, len(read.texts), LENGTH, "max", "cghp", 0)
    (batch,) = train_batches(data, updates, updates.num_packs)
    assert (batch["slot_weights"].sum(axis=1) > 1).all()
    objective = embedding_objective(task.loss_settings(config, read, settings))
    model = objective.build_model(text.config, 0)
    starting_weights.load(str(tmp_path / "start"), named_weights(model), text.config, model.head)
    engine = engines.make_engine(model, objective)
    gradients, sums = compiled(functools.partial(engine.gradients, training=True), model)(batch)

    theirs = package.SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu").eval()
    columns = [[row[name] for row in rows] for name in rows[0] if name != "score"]
    features = [theirs.preprocess(column) for column in columns]
    scores = torch.tensor([float(row.get("score", 0)) for row in rows])
    loss = losses.MultipleNegativesRankingLoss(theirs) if widths else getattr(losses, kind)(theirs)
    loss = losses.MatryoshkaLoss(theirs, loss, widths) if widths else loss
    loss = loss(features, scores)
    loss.backward()
    # Cosines in float32 are divided by 0.05
    assert float(sums["loss"]) / 6 == pytest.approx(float(loss.detach()), rel=2e-6)
    of_theirs = {f"bert.{name}": value.grad for name, value in theirs[0].model.named_parameters()}
    rows_of = {row.ours: row for row in tensor_names(text.config.num_hidden_layers, model.head)}
    for variable, found in zip(model.trainable_variables, gradients, strict=True):
        name = rows_of[variable.path.removeprefix("finetuning/")]
        want = name.from_hugging_face(of_theirs[name.hugging_face].numpy())
        found = np.asarray(ops.convert_to_tensor(found))
        if not variable.path.endswith("key/bias"):
            np.testing.assert_allclose(
                found, want, atol=1e-5 * np.abs(want).max(), rtol=0, err_msg=variable.path
            )


@pytest.mark.parametrize("num_documents", [7, 150])
def test_ranks_are_those_of_sentence_transformers(package, num_documents, tmp_path):
    """Which knows no grades: with them nDCG is scikit-learn's. Of equal documents the first comes first."""
    metrics = pytest.importorskip("sklearn.metrics", reason="pip install -e '.[reference]'")
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    rng = np.random.default_rng(num_documents)
    names = [f"d{number:03}" for number in range(num_documents)]
    queries = [f"q{number:02}" for number in range(12)]
    documents_MD = rng.normal(size=(num_documents, 12))
    documents_MD[2::3] = documents_MD[1::3][: len(documents_MD[2::3])]
    # Vectors have one dimension, so that similarities with equal documents are equal in any order of addition
    vectors = {
        **dict(zip(names, documents_MD, strict=True)),
        **dict(zip(queries, 3 * np.eye(12), strict=True)),
    }
    gains_QM = rng.integers(0, 4, (12, num_documents))
    gains_QM[3] = 0  # nothing is relevant
    gains_QM[5] = np.arange(num_documents) == 2

    def vectors_of(texts, *_, **__):
        return np.array([vectors[text] for text in texts])

    def scores_of(gains_QM):
        lines = [
            f"{query}\t{name}\t{gain:d}\n"
            for query, row in zip(queries, gains_QM, strict=True)
            for name, gain in zip(names, row, strict=True)
        ]
        (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
        return read_evaluation(tmp_path).score(vectors_of)

    (tmp_path / "qrels").mkdir()
    for file, ids in (("corpus", names), ("queries", queries)):
        rows = [json.dumps({"_id": name, "text": name}) + "\n" for name in ids]
        (tmp_path / f"{file}.jsonl").write_text("".join(rows))
    binary, graded = scores_of(gains_QM > 0), scores_of(gains_QM)
    evaluator = InformationRetrievalEvaluator(
        {name: name for name in queries},
        {name: name for name in names},
        {
            query: {names[i] for i in np.flatnonzero(row)}
            for query, row in zip(queries, gains_QM, strict=True)
        },
        precision_recall_at_k=[10, 100],
        score_functions={"cosine": package.util.cos_sim},
    )
    model = types.SimpleNamespace(encode_query=vectors_of, encode_document=vectors_of)
    theirs = evaluator.compute_all_metrics(model)["cosine"]
    parts = {name: name.split("@") for name in binary}
    want = {name: 100 * theirs[f"{kind}@k"][int(depth)] for name, (kind, depth) in parts.items()}
    assert binary == pytest.approx(want, rel=1e-9)
    similar_QM = package.util.cos_sim(vectors_of(queries), documents_MD).numpy()
    is_used_Q = gains_QM.any(axis=1)
    ordered_QM = similar_QM - 1e-9 * np.arange(num_documents)  # scikit-learn averages over ties
    want["ndcg@10"] = 100 * metrics.ndcg_score(gains_QM[is_used_Q], ordered_QM[is_used_Q], k=10)
    assert graded == pytest.approx(want, rel=1e-9)
    assert graded["ndcg@10"] < binary["ndcg@10"] < 100
