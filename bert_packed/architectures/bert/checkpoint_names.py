"""Names of BERT's tensors here, in Hugging Face's files and in Google's.

    here                                  Hugging Face                                          Google
    bert/layer_0/attention/query/kernel   bert.encoder.layer.0.attention.self.query.weight^T    bert/encoder/layer_0/attention/self/query/kernel
    next_sentence/classifier/kernel       cls.seq_relationship.weight^T                         cls/seq_relationship/output_weights^T

`^T`: stored as outputs × inputs there, as inputs × outputs here.
"""  # noqa: E501  a table row is longer than a line of code

import dataclasses

from bert_packed.architectures import registry
from bert_packed.architectures.registry import CheckpointNames, TensorName


def tensor_names(num_hidden_layers, head=registry.PRETRAINING):
    """The table of a model; for a head that only an objective knows, of the encoder alone."""
    table = [
        TensorName(f"bert/embeddings/{name}", f"bert.embeddings.{name}.weight", f"bert/embeddings/{name}")
        for name in ("word_embeddings", "token_type_embeddings", "position_embeddings")
    ]
    table += _norm("bert/embeddings", "bert.embeddings", "bert/embeddings")
    for i in range(num_hidden_layers):
        table += _block(f"bert/layer_{i}", f"bert.encoder.layer.{i}", f"bert/encoder/layer_{i}")
    return table + _HEADS.get(head, [])


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


_MASKED_LM = [
    *_dense("predictions/transform", "cls.predictions.transform.dense", "cls/predictions/transform/dense"),
    *_norm("predictions", "cls.predictions.transform", "cls/predictions/transform"),
    TensorName("predictions/output_bias", "cls.predictions.bias", "cls/predictions/output_bias"),
]
_TOKEN_CLASSIFICATION = _output("token_classification/classifier", "classifier", "")
# The last row of each is its output, by which a head is known
_HEADS = {
    registry.MASKED_LM: _MASKED_LM,
    registry.PRETRAINING: [
        *_dense("next_sentence/pooler", "bert.pooler.dense", "bert/pooler/dense"),
        *_MASKED_LM,
        *_output("next_sentence/classifier", "cls.seq_relationship", "cls/seq_relationship/"),
    ],
    registry.QUESTION_ANSWERING: _output("question_answering/output", "qa_outputs", "cls/squad/"),
    # google-research/bert has no such head
    registry.TOKEN_CLASSIFICATION: [dataclasses.replace(row, google="") for row in _TOKEN_CLASSIFICATION],
    registry.CLASSIFICATION: [
        *_dense("classification/pooler", "bert.pooler.dense", "bert/pooler/dense"),
        *_output("classification/classifier", "classifier", ""),
    ],
}


def _hugging_face_config(model):
    config = {
        "model_type": "bert",
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        **dataclasses.asdict(model.config),
    }
    if model.head in registry.CLASSIFYING_HEADS:
        # transformers takes one label for a number to predict
        config["num_labels"] = model.num_classes
    return config


NAMES = CheckpointNames(
    tensor_names=lambda config, head: tensor_names(config.num_hidden_layers, head),
    outputs={head: rows[-1] for head, rows in _HEADS.items()},
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
        registry.PRETRAINING: "BertForPreTraining",
        registry.MASKED_LM: "BertForMaskedLM",
        registry.QUESTION_ANSWERING: "BertForQuestionAnswering",
        registry.TOKEN_CLASSIFICATION: "BertForTokenClassification",
        registry.CLASSIFICATION: "BertForSequenceClassification",
        registry.EMBEDDING: "BertModel",
    },
    hugging_face_config=_hugging_face_config,
)
