"""Layers of a packed BERT: embeddings by position in the sequence, attention inside the sequence, heads.

Legend: B packs per batch, S pack length, D model width, N heads, H head width, F feed-forward width,
P predictions per pack, K sequences per pack, Q = P or K positions to gather, V vocabulary, C classes.
"""

import keras
from keras import ops

from bert_packed.layers.context import activation, attend_in_sequences, gather_tokens
from bert_packed.layers.dropout import Dropout
from bert_packed.layers.fast_gradients import copies, gradients_are_for
from bert_packed.layers.layout import COLUMNS, ONE_DEVICE, ROWS


def layer_norm(config):
    return keras.layers.LayerNormalization(epsilon=config.layer_norm_eps, name="LayerNorm")


class PackedEmbeddings(keras.layers.Layer):
    """Token, sentence and position embeddings: float `[B, S, D]`; padding is embedded like any token.

    Section 3.2.1 of "Efficient Sequence Packing without Cross-contamination": positions are looked up, not
    added by index. A pack of two sequences of lengths 2 and 3:

        rows looked up          [0 1 0 1 2]
        BERT's own bias add     [0 1 2 3 4]
    """

    def __init__(self, config, layout=ONE_DEVICE):
        super().__init__(name="embeddings")
        self.config = config
        self.layout = layout
        self.norm = layer_norm(config)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, *_):
        config = self.config
        self.word_embeddings_VD = self._table("word_embeddings", config.vocab_size, is_vocabulary=True)
        self.token_type_embeddings = self._table("token_type_embeddings", config.type_vocab_size)
        self.position_embeddings = self._table("position_embeddings", config.max_position_embeddings)
        self.norm.build((None, None, config.hidden_size))

    def _table(self, name, rows, is_vocabulary=False):
        return self.layout.add_table(self, rows, self.config, name, is_vocabulary=is_vocabulary)

    def call(self, token_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        hidden_BSD = (
            self.layout.look_up(self.word_embeddings_VD, token_ids_BS)
            + self.layout.look_up(self.token_type_embeddings, token_type_ids_BS)
            + self.layout.look_up(self.position_embeddings, position_ids_BS)
        )
        hidden_BSD = self.norm(ops.cast(hidden_BSD, self.compute_dtype))
        return self.dropout(hidden_BSD, training=training)


class SelfAttention(keras.layers.Layer):
    """Multi-head attention inside each sequence, with residual and layer norm after it.

    Args:
        attend: Fused kernel, or None for dense scores: function `(query_BSNH, key_BSNH, value_BSNH,
            sequence_ids_BS)` to float `[B, S, N, H]`; queries are scaled already. In training with dropout of
            attention it gets a further keyword, `dropout`: `RowDropout` of probabilities `[B, N, S, S]`.
        layout: `Layout` of the weights, which makes the linear layers.
    """

    def __init__(self, config, attend=None, layout=ONE_DEVICE):
        super().__init__(name="attention")
        self.attend = attend
        self.layout = layout
        self.num_heads = config.num_attention_heads
        self.head_width = config.hidden_size // config.num_attention_heads
        self.query = layout.dense(config.hidden_size, config, "query", split=COLUMNS)
        scale = self.head_width**-0.5
        self.query.scale = scale if scale.as_integer_ratio()[0] == 1 else None  # a power of 2, as of 64
        self.key = layout.dense(config.hidden_size, config, "key", split=COLUMNS)
        self.value = layout.dense(config.hidden_size, config, "value", split=COLUMNS)
        self.output_dense = layout.dense(config.hidden_size, config, "output", split=ROWS)
        self.norm = layer_norm(config)
        self.attention_dropout = Dropout(config.attention_probs_dropout_prob)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape, *_):
        for layer in (self.query, self.key, self.value, self.output_dense, self.norm):
            layer.build(hidden_shape)

    def call(self, hidden_BSD, context, training=None):
        """Attend inside the sequences of a `PackContext`; float `[B, S, D]` to the same."""
        *inputs, hidden_BSD = copies(hidden_BSD, 4)
        is_scaled = self.query.scale and gradients_are_for("gpu")
        query_BSNH, key_BSNH, value_BSNH = map(
            self._split_heads, self.layout.apply_together((self.query, self.key, self.value), inputs)
        )
        found_BSNH = attend_in_sequences(
            (query_BSNH if is_scaled else query_BSNH * self.head_width**-0.5, key_BSNH, value_BSNH),
            context,
            self.attention_dropout,
            training,
            self.attend,
            self.layout,
        )
        found_BSD = ops.reshape(found_BSNH, ops.shape(hidden_BSD))
        return self.norm(hidden_BSD + self.dropout(self.output_dense(found_BSD), training=training))

    def _split_heads(self, hidden_BSD):
        batch, length = ops.shape(hidden_BSD)[:2]
        return ops.reshape(hidden_BSD, (batch, length, self.num_heads, self.head_width))


class FeedForward(keras.layers.Layer):
    """BERT's two-layer network on each token, with residual and layer norm after it."""

    def __init__(self, config, layout=ONE_DEVICE):
        super().__init__(name="feed_forward")
        self.inner_width = config.intermediate_size
        self.intermediate = layout.dense(config.intermediate_size, config, "intermediate", split=COLUMNS)
        self.output_dense = layout.dense(config.hidden_size, config, "output", split=ROWS)
        self.activation = activation(config.hidden_act)
        self.norm = layer_norm(config)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def build(self, hidden_shape):
        self.intermediate.build(hidden_shape)
        self.output_dense.build((*hidden_shape[:-1], self.inner_width))
        self.norm.build(hidden_shape)

    def call(self, hidden_BSD, training=None):
        return self.norm(self.add(hidden_BSD, training=training))

    def add(self, hidden_BSD, training=None):
        """The result of `call` before its norm."""
        inner_BSF = self.activation(self.intermediate(hidden_BSD))
        return hidden_BSD + self.dropout(self.output_dense(inner_BSF), training=training)


class TransformerBlock(keras.layers.Layer):
    """One encoder block: attention inside each sequence, then the feed-forward network."""

    def __init__(self, config, name, attend=None, layout=ONE_DEVICE):
        super().__init__(name=name)
        self.attention = SelfAttention(config, attend=attend, layout=layout)
        self.feed_forward = FeedForward(config, layout=layout)

    def build(self, hidden_shape, *_):
        self.attention.build(hidden_shape)
        self.feed_forward.build(hidden_shape)

    def call(self, hidden_BSD, context, training=None):
        hidden_BSD = self.attention(hidden_BSD, context=context, training=training)
        return self.feed_forward(hidden_BSD, training=training)

    @property
    def final_norm(self):
        """The layer norm that `call` ends with; None for a subclass with another `call`."""
        parts = ((self, TransformerBlock), (self.feed_forward, FeedForward))
        is_ours = all(type(part).call is kind.call for part, kind in parts)
        return self.feed_forward.norm if is_ours else None

    def call_up_to_norm(self, hidden_BSD, context, training=None):
        """The result of `call` before `final_norm`."""
        hidden_BSD = self.attention(hidden_BSD, context=context, training=training)
        return self.feed_forward.add(hidden_BSD, training=training)


class MaskedLanguageModelHead(keras.layers.Layer):
    """Vocabulary logits of the gathered predictions: float32 `[B, P, V]`, by the word embeddings."""

    def __init__(self, config, layout=ONE_DEVICE):
        super().__init__(name="predictions", autocast=False)  # the table stays float32
        self.config = config
        self.layout = layout
        self.transform = layout.dense(config.hidden_size, config, "transform")
        self.activation = activation(config.hidden_act)
        self.norm = layer_norm(config)

    def build(self, hidden_shape):
        self.transform.build(hidden_shape)
        self.norm.build(hidden_shape)
        self.output_bias_V = self.layout.add_vocabulary_bias(self, self.config, "output_bias")

    def call(self, hidden_BSD, positions_BP, word_embeddings_VD):
        gathered_BPD = gather_tokens(hidden_BSD, positions_BP)
        gathered_BPD = self.norm(self.activation(self.transform(gathered_BPD)))
        logits_BPV = self.layout.float32_logits(gathered_BPD, word_embeddings_VD) + self.output_bias_V
        return self.layout.without_padding(logits_BPV, self.config.vocab_size)


class ClassificationHead(keras.layers.Layer):
    """BERT's pooler and class logits of every [CLS] in the pack: float32 `[B, K, C]`.

    Args:
        num_classes: C; 2 for next sentences, where class 1 is a random one; 1 for a number to predict.
        rate: Rate of the dropout between pooler and classifier.
    """

    def __init__(self, config, num_classes, name, rate=0.0, layout=ONE_DEVICE):
        super().__init__(name=name)
        self.pooler = layout.dense(config.hidden_size, config, "pooler")
        self.classifier = layout.dense(num_classes, config, "classifier", dtype="float32")
        self.dropout = Dropout(rate)

    def build(self, hidden_shape, *_):
        self.pooler.build(hidden_shape)
        self.classifier.build(hidden_shape)

    def call(self, hidden_BSD, positions_BK, training=None):
        pooled_BKD = ops.tanh(self.pooler(gather_tokens(hidden_BSD, positions_BK)))
        return self.classifier(self.dropout(pooled_BKD, training=training))


class NextSentenceHead(ClassificationHead):
    """The `ClassificationHead` of pre-training; class 1 is a random next sentence."""

    # A class apart, as a .keras file names its weights by the class: `layers/next_sentence_head`
    def __init__(self, config, layout=ONE_DEVICE):
        super().__init__(config, 2, "next_sentence", layout=layout)
