"""Packed BERT as a Keras model, with its heads, and its count of operations.

Legend: B packs per batch, S pack length, D model width, P predictions per pack, K sequences per pack,
V vocabulary, C classes; of operations: L blocks, F feed-forward width.
"""

import inspect

import keras
from keras import ops

from bert_packed.architectures import registry
from bert_packed.architectures.bert.config import ModelConfig
from bert_packed.architectures.bert.layers import (
    ClassificationHead,
    MaskedLanguageModelHead,
    NextSentenceHead,
    PackedEmbeddings,
    TransformerBlock,
)
from bert_packed.architectures.packed_model import PackedModel
from bert_packed.layers.context import ablated_context, ablated_positions
from bert_packed.layers.dropout import Dropout
from bert_packed.layers.layout import ONE_DEVICE
from bert_packed.layers.rematerialisation import run_blocks


class PackedEncoder(keras.layers.Layer):
    """Embeddings and encoder blocks over packs.

    Args:
        block: Function `(config, name)` to an encoder block, a layer called as
            `block(hidden_BSD, context=..., training=...)`.
        remat: True to recompute each block in the backward pass instead of keeping its activations.
        attend, layout: Arguments of `layers.SelfAttention`; only for a `block` that takes them.
    """

    def __init__(self, config, block=TransformerBlock, remat=False, attend=None, layout=ONE_DEVICE):
        super().__init__(name="bert")
        self.remat = remat
        self.config = config
        self.embeddings = PackedEmbeddings(config, layout=layout)
        # Other blocks may not have these arguments
        given = {"attend": attend} if attend is not None else {}
        given |= {"layout": layout} if layout is not ONE_DEVICE else {}
        for option in given:
            if option not in inspect.signature(block).parameters:
                raise ValueError(f"`{option}` must not be given for a block without it. Received: {block}.")
        self.blocks = [block(config, name=f"layer_{i}", **given) for i in range(config.num_hidden_layers)]

    def build(self, *_):
        self.embeddings.build()
        for block in self.blocks:
            block.build((None, None, self.config.hidden_size))

    def call(self, token_ids_BS, sequence_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        hidden_BSD = self.embed(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)
        return self.run_blocks(hidden_BSD, sequence_ids_BS, position_ids_BS, training=training)

    def embed(self, token_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        position_ids_BS = ablated_positions(self.config, position_ids_BS)
        return self.embeddings(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)

    def run_blocks(self, hidden_BSD, sequence_ids_BS, position_ids_BS, training=None):
        """The encoder after its embeddings."""
        context = ablated_context(self.config, sequence_ids_BS, position_ids_BS)
        return run_blocks(self.blocks, hidden_BSD, context, self.remat, training)


class PackedBert(PackedModel):
    """A BERT encoder of packs with heads on it.

    Reads also `token_type_ids` `[B, S]` (sentence A is 0, B is 1) and `cls_positions` `[B, K]`, whose unused
    slots hold 0. `encoder` holds arguments of `PackedEncoder`; its `layout` makes the heads' layers too.
    """

    config_class = ModelConfig
    encoder_inputs = ("token_ids", "sequence_ids", "token_type_ids", "position_ids")

    def __init__(self, config, name="finetuning", num_classes=None, **encoder):
        super().__init__(config, name, num_classes)
        self.block = encoder.get("block", TransformerBlock)
        self.layout = encoder.get("layout", ONE_DEVICE)
        self.bert = PackedEncoder(config, **encoder)

    def encode(self, batch, training=None):
        return self.bert(*(batch[name] for name in self.encoder_inputs), training=training)

    def embed(self, batch):
        names = ("token_ids", "token_type_ids", "position_ids")
        return self.bert.embed(*(batch[name] for name in names), training=False)

    def encode_embedded(self, hidden_BSD, batch):
        return self.bert.run_blocks(hidden_BSD, batch["sequence_ids"], batch["position_ids"], training=False)

    def get_config(self):
        """Arguments to make the model again from a `.keras` file; raises `ValueError` for other blocks."""
        if self.block is not TransformerBlock:
            raise ValueError(f"`block` must be TransformerBlock to be saved. Received: {self.block}.")
        return super().get_config()


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForMaskedLM(PackedBert):
    """Packed BERT that predicts masked tokens: a dict of `mlm_logits`, float32 `[B, P, V]`; it has no pooler.

    Reads also `prediction_positions` `[B, P]`, whose unused slots hold 0.
    """

    head = registry.MASKED_LM

    def __init__(self, config, name="pretraining", **encoder):
        super().__init__(config, name, **encoder)
        self.predictions = MaskedLanguageModelHead(config, layout=self.layout)

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.bert.embeddings.word_embeddings_VD
        return {"mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForPretraining(PackedBertForMaskedLM):
    """Packed BERT with both pre-training heads: `nsp_logits`, float32 `[B, K, 2]`, come with `mlm_logits`."""

    head = registry.PRETRAINING

    def __init__(self, config, name="pretraining", **encoder):
        super().__init__(config, name, **encoder)
        self.next_sentence = NextSentenceHead(config, layout=self.layout)

    def apply_heads(self, hidden_BSD, batch, training=None):
        nsp_BK2 = self.next_sentence(hidden_BSD, batch["cls_positions"])
        return {**super().apply_heads(hidden_BSD, batch, training), "nsp_logits": nsp_BK2}


class AnswerHead(keras.layers.Layer):
    """Logits of every token as an answer's start and end: two float32 `[B, S]`."""

    def __init__(self, config, layout=ONE_DEVICE):
        super().__init__(name=registry.QUESTION_ANSWERING)
        self.output_dense = layout.dense(2, config, "output", dtype="float32")

    def build(self, hidden_shape):
        self.output_dense.build(hidden_shape)

    def call(self, hidden_BSD):
        logits_BS2 = self.output_dense(hidden_BSD)
        return logits_BS2[..., 0], logits_BS2[..., 1]


class TokenClassificationHead(keras.layers.Layer):
    """Class logits of every token: float32 `[B, S, C]`."""

    def __init__(self, config, num_classes, layout=ONE_DEVICE):
        super().__init__(name=registry.TOKEN_CLASSIFICATION)
        self.classifier = layout.dense(num_classes, config, "classifier", dtype="float32")
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape):
        self.classifier.build(hidden_shape)

    def call(self, hidden_BSD, training=None):
        return self.classifier(self.dropout(hidden_BSD, training=training))


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForQuestionAnswering(PackedBert):
    """Packed BERT that finds answers: a dict of `start_logits` and `end_logits`, float32 `[B, S]`."""

    head = registry.QUESTION_ANSWERING

    def __init__(self, config, name="finetuning", **encoder):
        super().__init__(config, name, **encoder)
        self.question_answering = AnswerHead(config, layout=self.layout)

    def apply_heads(self, hidden_BSD, batch, training=None):
        start_BS, end_BS = self.question_answering(hidden_BSD)
        return {"start_logits": start_BS, "end_logits": end_BS}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForClassification(PackedBert):
    """Packed BERT that gives every sequence a class or a number: a dict of `logits`, float32 `[B, K, C]`."""

    head = registry.CLASSIFICATION

    def __init__(self, config, num_classes, name="finetuning", **encoder):
        super().__init__(config, name, num_classes, **encoder)
        rate = config.hidden_dropout_prob
        self.classification = ClassificationHead(config, num_classes, self.head, rate, self.layout)

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.classification(hidden_BSD, batch["cls_positions"], training=training)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForTokenClassification(PackedBert):
    """Packed BERT that gives every token a class: a dict of `logits`, float32 `[B, S, C]`."""

    head = registry.TOKEN_CLASSIFICATION

    def __init__(self, config, num_classes, name="finetuning", **encoder):
        super().__init__(config, name, num_classes, **encoder)
        self.token_classification = TokenClassificationHead(config, num_classes, layout=self.layout)

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"logits": self.token_classification(hidden_BSD, training=training)}


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForEmbedding(PackedBert):
    """Packed BERT without a head: a dict of `hidden_states`, float32 `[B, S, D]`."""

    head = registry.EMBEDDING

    def apply_heads(self, hidden_BSD, batch, training=None):
        return {"hidden_states": ops.cast(hidden_BSD, "float32")}


def make_model(head, config, num_outputs, block=None, remat=False, attend=None, layout=ONE_DEVICE):
    """A BERT with one of its family's heads, not yet built; arguments as in `packed_model.build_model`."""
    encoder = {"remat": remat, "attend": attend, "layout": layout, **({"block": block} if block else {})}
    classes = {"num_classes": num_outputs} if head in registry.CLASSIFYING_HEADS else {}
    kinds = {
        registry.PRETRAINING: PackedBertForPretraining,
        registry.MASKED_LM: PackedBertForMaskedLM,
        registry.QUESTION_ANSWERING: PackedBertForQuestionAnswering,
        registry.CLASSIFICATION: PackedBertForClassification,
        registry.TOKEN_CLASSIFICATION: PackedBertForTokenClassification,
        registry.EMBEDDING: PackedBertForEmbedding,
    }
    return kinds[head](config, **classes, **encoder)


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
    if head in (registry.PRETRAINING, registry.MASKED_LM):
        flops += 6 * (width**2 + width * config.vocab_size) * sums["num_predictions"]
    if head == registry.PRETRAINING:
        flops += 6 * (width**2 + 2 * width) * sums["num_sequences"]
    return flops
