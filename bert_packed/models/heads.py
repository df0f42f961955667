"""Packed BERT with a head to fine-tune: answer spans, or one label for every sequence of the pack.

Legend: B packs per batch, S pack length, D model width, K sequences per pack, C classes.
"""

import dataclasses

import keras
from keras import ops

from bert_packed.config import ModelConfig
from bert_packed.models.layers import Dropout, dense, gather_tokens
from bert_packed.models.modeling import (
    CLASSIFICATION,
    QUESTION_ANSWERING,
    PackedEncoder,
    build_pretraining_model,
    build_seeded,
)


class AnswerHead(keras.layers.Layer):
    """How well an answer starts and ends at each token."""

    def __init__(self, config, name=QUESTION_ANSWERING, **kwargs):
        super().__init__(name=name, **kwargs)
        self.output_dense = dense(2, config, "output", dtype="float32")

    def build(self, hidden_shape):
        self.output_dense.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD):
        """Float `[B, S, D]` to two float32 `[B, S]`: logits of starts and of ends."""
        logits_BS2 = self.output_dense(hidden_BSD)
        return logits_BS2[..., 0], logits_BS2[..., 1]


class ClassificationHead(keras.layers.Layer):
    """Pooler and class logits of every [CLS] in the pack; one class is a number to predict."""

    def __init__(self, config, num_classes, name=CLASSIFICATION, **kwargs):
        super().__init__(name=name, **kwargs)
        self.pooler = dense(config.hidden_size, config, "pooler")
        self.classifier = dense(num_classes, config, "classifier", dtype="float32")
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape, *_):
        self.pooler.build(hidden_shape)
        self.classifier.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, positions_BK, training=None):
        """Float32 logits `[B, K, C]` at int32 positions `[B, K]` of [CLS]; unused slots hold position 0."""
        pooled_BKD = ops.tanh(self.pooler(gather_tokens(hidden_BSD, positions_BK)))
        return self.classifier(self.dropout(pooled_BKD, training=training))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForQuestionAnswering(keras.Model):
    """Packed BERT that finds answers.

    Call it with a batch as of `PackedBertForPretraining`; what concerns pre-training is not needed. Returns
    a dict of `start_logits` and `end_logits`, float32 `[B, S]`; which of them compete is told by the batch's
    `sequence_ids`.
    """

    head = QUESTION_ANSWERING

    def __init__(self, config, remat=False, name="finetuning", **kwargs):
        super().__init__(name=name, **kwargs)
        self.config = config
        self.bert = PackedEncoder(config, remat=remat)
        self.question_answering = AnswerHead(config)

    def build(self, *_):
        self.bert.build()
        self.question_answering.build((None, None, self.config.hidden_size))
        self.built = True

    def call(self, batch, training=None):
        start_BS, end_BS = self.question_answering(_encode(self.bert, batch, training))
        return {"start_logits": start_BS, "end_logits": end_BS}

    def get_config(self):
        """What a `.keras` file needs to make the model again."""
        return {"config": dataclasses.asdict(self.config), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """The model of `get_config`, with all its variables."""
        return _built(cls(ModelConfig(**config["config"]), name=config["name"]))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForClassification(keras.Model):
    """Packed BERT that gives every sequence a class or a number.

    Call it with a batch as of `PackedBertForPretraining`; what concerns pre-training is not needed. Returns
    a dict of `logits`, float32 `[B, K, C]`.

    Args:
        config: `ModelConfig`.
        num_classes: C; 1 for a number.
    """

    head = CLASSIFICATION

    def __init__(self, config, num_classes, remat=False, name="finetuning", **kwargs):
        super().__init__(name=name, **kwargs)
        self.config = config
        self.bert = PackedEncoder(config, remat=remat)
        self.classification = ClassificationHead(config, num_classes)

    def build(self, *_):
        self.bert.build()
        self.classification.build((None, None, self.config.hidden_size))
        self.built = True

    def call(self, batch, training=None):
        hidden_BSD = _encode(self.bert, batch, training)
        return {"logits": self.classification(hidden_BSD, batch["cls_positions"], training=training)}

    def get_config(self):
        """What a `.keras` file needs to make the model again."""
        num_classes = self.classification.classifier.units
        return {"config": dataclasses.asdict(self.config), "num_classes": num_classes, "name": self.name}

    @classmethod
    def from_config(cls, config):
        """The model of `get_config`, with all its variables."""
        return _built(cls(ModelConfig(**config["config"]), config["num_classes"], name=config["name"]))


def build_question_answering_model(config, seed, dtype="float32", remat=False):
    """`PackedBertForQuestionAnswering` with all its variables; arguments as of `build_pretraining_model`."""
    return build_seeded(lambda: PackedBertForQuestionAnswering(config, remat), seed, dtype)


def build_classification_model(config, num_classes, seed, dtype="float32", remat=False):
    """`PackedBertForClassification` with all its variables; arguments as of `build_pretraining_model`."""
    return build_seeded(lambda: PackedBertForClassification(config, num_classes, remat), seed, dtype)


def build_model(head, config, num_outputs, seed, dtype="float32", remat=False):
    """The model with one of `modeling.HEADS`; `num_outputs` counts the classes of a classification."""
    if head == QUESTION_ANSWERING:
        return build_question_answering_model(config, seed, dtype, remat)
    if head == CLASSIFICATION:
        return build_classification_model(config, num_outputs, seed, dtype, remat)
    return build_pretraining_model(config, seed, dtype=dtype, remat=remat)


def _built(model):
    model.build()
    return model


def _encode(encoder, batch, training):
    names = ("token_ids", "sequence_ids", "token_type_ids", "position_ids")
    return encoder(*(batch[name] for name in names), training=training)
