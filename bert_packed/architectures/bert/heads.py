"""Packed BERT with heads for fine-tuning, and BERT's count of operations.

Legend: B packs per batch, S pack length, D model width, K sequences per pack, C classes; of operations:
L blocks, F feed-forward width, V vocabulary.
"""

import keras

from bert_packed.architectures.bert.layers import ClassificationHead, Dropout
from bert_packed.architectures.bert.model import PackedBert, PackedBertForMaskedLM, PackedBertForPretraining
from bert_packed.architectures.registry import (
    CLASSIFICATION,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    TOKEN_CLASSIFICATION,
)
from bert_packed.layers.layout import ONE_DEVICE


class AnswerHead(keras.layers.Layer):
    """Logits of every token as an answer's start and end: two float32 `[B, S]`."""

    def __init__(self, config, name=QUESTION_ANSWERING, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.output_dense = layout.dense(2, config, "output", dtype="float32")

    def build(self, hidden_shape):
        self.output_dense.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD):
        logits_BS2 = self.output_dense(hidden_BSD)
        return logits_BS2[..., 0], logits_BS2[..., 1]


class TokenClassificationHead(keras.layers.Layer):
    """Class logits of every token: float32 `[B, S, C]`."""

    def __init__(self, config, num_classes, name=TOKEN_CLASSIFICATION, layout=ONE_DEVICE, **kwargs):
        super().__init__(name=name, **kwargs)
        self.classifier = layout.dense(num_classes, config, "classifier", dtype="float32")
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape):
        self.classifier.build(hidden_shape)
        self.built = True

    def call(self, hidden_BSD, training=None):
        return self.classifier(self.dropout(hidden_BSD, training=training))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForQuestionAnswering(PackedBert):
    """Packed BERT that finds answers: a dict of `start_logits` and `end_logits`, float32 `[B, S]`."""

    head = QUESTION_ANSWERING

    def __init__(self, config, name="finetuning", **encoder):
        super().__init__(config, name, **encoder)
        self.question_answering = AnswerHead(config, layout=self.layout)

    def build_heads(self, hidden_shape):
        self.question_answering.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        start_BS, end_BS = self.question_answering(hidden_BSD)
        return {"start_logits": start_BS, "end_logits": end_BS}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForClassification(PackedBert):
    """Packed BERT that gives every sequence a class or a number: a dict of `logits`, float32 `[B, K, C]`."""

    head = CLASSIFICATION

    def __init__(self, config, num_classes, name="finetuning", **encoder):
        super().__init__(config, name, num_classes, **encoder)
        rate = config.hidden_dropout_prob
        self.classification = ClassificationHead(config, num_classes, CLASSIFICATION, rate, self.layout)

    def build_heads(self, hidden_shape):
        self.classification.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.classification(hidden_BSD, batch["cls_positions"], training=training)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForTokenClassification(PackedBert):
    """Packed BERT that gives every token a class: a dict of `logits`, float32 `[B, S, C]`."""

    head = TOKEN_CLASSIFICATION

    def __init__(self, config, num_classes, name="finetuning", **encoder):
        super().__init__(config, name, num_classes, **encoder)
        self.token_classification = TokenClassificationHead(config, num_classes, layout=self.layout)

    def build_heads(self, hidden_shape):
        self.token_classification.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.token_classification(hidden_BSD, training=training)}


def make_model(head, config, num_outputs, block=None, remat=False, attend=None, layout=ONE_DEVICE):
    """A BERT with one of its family's heads, not yet built; arguments as in `packed_model.build_model`."""
    encoder = {"remat": remat, "attend": attend, "layout": layout, **({"block": block} if block else {})}
    if head == QUESTION_ANSWERING:
        return PackedBertForQuestionAnswering(config, **encoder)
    if head == CLASSIFICATION:
        return PackedBertForClassification(config, num_outputs, **encoder)
    if head == TOKEN_CLASSIFICATION:
        return PackedBertForTokenClassification(config, num_outputs, **encoder)
    kinds = {PRETRAINING: PackedBertForPretraining, MASKED_LM: PackedBertForMaskedLM}
    return kinds[head](config, **encoder)


def count_flops(head, config, sums):
    """Operations that a BERT needs to learn from sequences, forward and backward: float.

    Counted as in Appendix B of "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al. 2022):

        6 L (4 D^2 + 2 D F)      per token; L blocks, F feed-forward width
        12 L D                   per pair of tokens of one sequence, each token with itself too
        6 (D^2 + D V)            per masked-LM prediction
        6 (D^2 + 2 D)            per sequence, for its next-sentence prediction

    Padding, scores between sequences, and what `--remat` recomputes do not count, nor does anything that is
    no matrix product. The small heads of fine-tuning are left out. `head` None counts the encoder alone.
    """
    width, blocks = config.hidden_size, config.num_hidden_layers
    per_token = 6 * blocks * config.block_weights
    flops = per_token * sums["num_tokens"] + 12 * blocks * width * sums["num_pairs"]
    if head in (PRETRAINING, MASKED_LM):
        flops += 6 * (width**2 + width * config.vocab_size) * sums["num_predictions"]
    if head == PRETRAINING:
        flops += 6 * (width**2 + 2 * width) * sums["num_sequences"]
    return flops
