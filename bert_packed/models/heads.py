"""Packed BERT with a head to fine-tune: answer spans, or labels of the pack's sequences or of its tokens.

Legend: B packs per batch, S pack length, D model width, K sequences per pack, C classes.
"""

import keras
from keras import ops

from bert_packed.models.layers import Dropout, gather_tokens
from bert_packed.models.layout import ONE_DEVICE
from bert_packed.models.modeling import (
    CLASSIFICATION,
    HEADS,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
    PackedBert,
    build_masked_lm_model,
    build_pretraining_model,
    build_seeded,
)


class AnswerHead(keras.layers.Layer):
    """How well an answer starts and ends at each token."""

    def __init__(self, config, name=QUESTION_ANSWERING, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.output_dense = layout.dense(2, config, "output", dtype="float32")

    def build(self, hidden_shape):
        self.output_dense.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD):
        """Float `[B, S, D]` to two float32 `[B, S]`: logits of starts and of ends."""
        logits_BS2 = self.output_dense(hidden_BSD)
        return logits_BS2[..., 0], logits_BS2[..., 1]


class ClassificationHead(keras.layers.Layer):
    """Pooler and class logits of every [CLS] in the pack; one class is a number to predict."""

    def __init__(self, config, num_classes, name=CLASSIFICATION, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.pooler = layout.dense(config.hidden_size, config, "pooler")
        self.classifier = layout.dense(num_classes, config, "classifier", dtype="float32")
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape, *_):
        self.pooler.build(hidden_shape)
        self.classifier.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, positions_BK, training=None):
        """Float32 logits `[B, K, C]` at int32 positions `[B, K]` of [CLS]; unused slots hold position 0."""
        pooled_BKD = ops.tanh(self.pooler(gather_tokens(hidden_BSD, positions_BK)))
        return self.classifier(self.dropout(pooled_BKD, training=training))


class TokenClassificationHead(keras.layers.Layer):
    """Class logits of every token."""

    def __init__(self, config, num_classes, name=TOKEN_CLASSIFICATION, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.classifier = layout.dense(num_classes, config, "classifier", dtype="float32")
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape):
        self.classifier.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, training=None):
        """Float `[B, S, D]` to float32 logits `[B, S, C]`."""
        return self.classifier(self.dropout(hidden_BSD, training=training))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForQuestionAnswering(PackedBert):
    """Packed BERT that finds answers.

    Returns a dict of `start_logits` and `end_logits`, float32 `[B, S]`; which of them compete is told by the
    batch's `sequence_ids`. Arguments as of `PackedBertForPretraining`.
    """

    head = QUESTION_ANSWERING

    def __init__(self, config, name="finetuning", **encoder):
        super().__init__(config, name, **encoder)
        self.question_answering = AnswerHead(config, layout=encoder.get("layout", ONE_DEVICE))

    def build_heads(self, hidden_shape):
        self.question_answering.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        start_BS, end_BS = self.question_answering(hidden_BSD)
        return {"start_logits": start_BS, "end_logits": end_BS}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForClassification(PackedBert):
    """Packed BERT that gives every sequence a class or a number.

    Returns a dict of `logits`, float32 `[B, K, C]`.

    Args:
        config: `ModelConfig`.
        num_classes: C; 1 for a number.
        encoder: As of `PackedBertForPretraining`.
    """

    head = CLASSIFICATION

    def __init__(self, config, num_classes, name="finetuning", **encoder):
        super().__init__(config, name, **encoder)
        self.num_classes = num_classes
        layout = encoder.get("layout", ONE_DEVICE)
        self.classification = ClassificationHead(config, num_classes, layout=layout)

    def build_heads(self, hidden_shape):
        self.classification.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.classification(hidden_BSD, batch["cls_positions"], training=training)}

    def get_config(self):
        """As of `PackedModel`."""
        return {**super().get_config(), "num_classes": self.num_classes}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForTokenClassification(PackedBert):
    """Packed BERT that gives every token a class.

    Returns a dict of `logits`, float32 `[B, S, C]`. Arguments as of `PackedBertForClassification`.
    """

    head = TOKEN_CLASSIFICATION

    def __init__(self, config, num_classes, name="finetuning", **encoder):
        super().__init__(config, name, **encoder)
        self.num_classes = num_classes
        layout = encoder.get("layout", ONE_DEVICE)
        self.token_classification = TokenClassificationHead(config, num_classes, layout=layout)

    def build_heads(self, hidden_shape):
        self.token_classification.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.token_classification(hidden_BSD, training=training)}

    def get_config(self):
        """As of `PackedModel`."""
        return {**super().get_config(), "num_classes": self.num_classes}


def build_question_answering_model(config, seed, dtype="float32", **encoder):
    """`PackedBertForQuestionAnswering` with all its variables; arguments as of `build_pretraining_model`."""
    return build_seeded(lambda: PackedBertForQuestionAnswering(config, **encoder), seed, dtype)


def build_classification_model(config, num_classes, seed, dtype="float32", **encoder):
    """`PackedBertForClassification` with all its variables; arguments as of `build_pretraining_model`."""
    return build_seeded(lambda: PackedBertForClassification(config, num_classes, **encoder), seed, dtype)


def build_token_classification_model(config, num_classes, seed, dtype="float32", **encoder):
    """`PackedBertForTokenClassification` with all its variables; see `build_classification_model`."""
    return build_seeded(lambda: PackedBertForTokenClassification(config, num_classes, **encoder), seed, dtype)


def build_model(head, config, num_outputs, seed, dtype="float32", **encoder):
    """The model with one of `modeling.HEADS`; `num_outputs` counts the classes of a classification.

    Raises:
        ValueError: there is no such head.
    """
    if head == QUESTION_ANSWERING:
        return build_question_answering_model(config, seed, dtype, **encoder)
    if head == CLASSIFICATION:
        return build_classification_model(config, num_outputs, seed, dtype, **encoder)
    if head == MASKED_LM:
        return build_masked_lm_model(config, seed, dtype, **encoder)
    if head == TOKEN_CLASSIFICATION:
        return build_token_classification_model(config, num_outputs, seed, dtype, **encoder)
    if head != PRETRAINING:
        raise ValueError(f"`head` must be one of {', '.join(HEADS)}. Received: {head!r}.")
    return build_pretraining_model(config, seed, dtype, **encoder)
