"""Names of BERT's tensors here, in Hugging Face's files and in Google's.

    here                                  Hugging Face                                          Google
    bert/layer_0/attention/query/kernel   bert.encoder.layer.0.attention.self.query.weight^T    bert/encoder/layer_0/attention/self/query/kernel
    next_sentence/classifier/kernel       cls.seq_relationship.weight^T                         cls/seq_relationship/output_weights^T

`^T`: stored as outputs × inputs there, as inputs × outputs here.
"""  # noqa: E501  a table row is longer than a line of code

import dataclasses

from bert_packed.architectures.registry import (
    CLASSIFICATION,
    EMBEDDING,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    CheckpointNames,
    TensorName,
)


def tensor_names(num_hidden_layers, head=PRETRAINING):
    """The table for a number of layers and a head: list of `TensorName`.

    For a head that only an objective knows, the table has the encoder alone.
    """
    table = [
        TensorName(f"bert/embeddings/{name}", f"bert.embeddings.{name}.weight", f"bert/embeddings/{name}")
        for name in ("word_embeddings", "token_type_embeddings", "position_embeddings")
    ]
    table += _norm("bert/embeddings", "bert.embeddings", "bert/embeddings")
    for i in range(num_hidden_layers):
        table += _block(f"bert/layer_{i}", f"bert.encoder.layer.{i}", f"bert/encoder/layer_{i}")
    return table + _HEAD_ROWS.get(head, list)()


def _pretraining_rows():
    rows = _dense("next_sentence/pooler", "bert.pooler.dense", "bert/pooler/dense") + _masked_lm_rows()
    return rows + _output("next_sentence/classifier", "cls.seq_relationship", "cls/seq_relationship/")


def _masked_lm_rows():
    head = "cls/predictions"
    rows = _dense("predictions/transform", "cls.predictions.transform.dense", f"{head}/transform/dense")
    rows += _norm("predictions", "cls.predictions.transform", f"{head}/transform")
    return [*rows, TensorName("predictions/output_bias", "cls.predictions.bias", f"{head}/output_bias")]


def _question_answering_rows():
    return _output("question_answering/output", "qa_outputs", "cls/squad/")


def _classification_rows():
    rows = _dense("classification/pooler", "bert.pooler.dense", "bert/pooler/dense")
    return rows + _output("classification/classifier", "classifier", "")


def _token_classification_rows():
    rows = _output("token_classification/classifier", "classifier", "")
    return [dataclasses.replace(row, google="") for row in rows]  # google-research/bert has no such head


_HEAD_ROWS = {
    PRETRAINING: _pretraining_rows,
    MASKED_LM: _masked_lm_rows,
    QUESTION_ANSWERING: _question_answering_rows,
    TOKEN_CLASSIFICATION: _token_classification_rows,
    CLASSIFICATION: _classification_rows,
}


def _block(ours, hugging_face, google):
    parts = {
        "attention/query": "attention/self/query",
        "attention/key": "attention/self/key",
        "attention/value": "attention/self/value",
        "attention/output": "attention/output/dense",
        "feed_forward/intermediate": "intermediate/dense",
        "feed_forward/output": "output/dense",
    }
    rows = []
    for part, theirs in parts.items():
        rows += _dense(f"{ours}/{part}", f"{hugging_face}.{theirs.replace('/', '.')}", f"{google}/{theirs}")
    for part, theirs in {"attention": "attention/output", "feed_forward": "output"}.items():
        rows += _norm(f"{ours}/{part}", f"{hugging_face}.{theirs.replace('/', '.')}", f"{google}/{theirs}")
    return rows


def _dense(ours, hugging_face, google):
    return [
        TensorName(f"{ours}/kernel", f"{hugging_face}.weight", f"{google}/kernel", True),
        TensorName(f"{ours}/bias", f"{hugging_face}.bias", f"{google}/bias"),
    ]


def _norm(ours, hugging_face, google):
    norm = "LayerNorm"
    return [
        TensorName(f"{ours}/{norm}/gamma", f"{hugging_face}.{norm}.weight", f"{google}/{norm}/gamma"),
        TensorName(f"{ours}/{norm}/beta", f"{hugging_face}.{norm}.bias", f"{google}/{norm}/beta"),
    ]


def _output(ours, hugging_face, google):
    # Google, too, stores a head's last layer as outputs × inputs
    return [
        TensorName(f"{ours}/kernel", f"{hugging_face}.weight", f"{google}output_weights", True, True),
        TensorName(f"{ours}/bias", f"{hugging_face}.bias", f"{google}output_bias"),
    ]


def _hugging_face_config(model):
    config = {
        "model_type": "bert",
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        **dataclasses.asdict(model.config),
    }
    if model.head in (CLASSIFICATION, TOKEN_CLASSIFICATION):
        # transformers takes one label for a number to predict
        config["num_labels"] = model.num_classes
    return config


# One row for each output, by which a head is known
_OUTPUTS = {
    MASKED_LM: "predictions/output_bias",
    PRETRAINING: "next_sentence/classifier/bias",
    QUESTION_ANSWERING: "question_answering/output/bias",
    TOKEN_CLASSIFICATION: "token_classification/classifier/bias",
    CLASSIFICATION: "classification/classifier/bias",
}

NAMES = CheckpointNames(
    tensor_names=lambda config, head: tensor_names(config.num_hidden_layers, head),
    outputs={
        head: next(row for row in tensor_names(0, head) if row.ours == name)
        for head, name in _OUTPUTS.items()
    },
    encoder="bert/",
    prefix="bert.",
    bare_parts=("embeddings", "encoder", "pooler"),
    spellings=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    tied=(
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    shapeless=("num_attention_heads", "hidden_act", "layer_norm_eps"),
    classes={
        PRETRAINING: "BertForPreTraining",
        MASKED_LM: "BertForMaskedLM",
        QUESTION_ANSWERING: "BertForQuestionAnswering",
        TOKEN_CLASSIFICATION: "BertForTokenClassification",
        CLASSIFICATION: "BertForSequenceClassification",
        EMBEDDING: "BertModel",
    },
    hugging_face_config=_hugging_face_config,
)
