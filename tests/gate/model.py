"""Its model.

Legend: B packs per batch, S pack length, D model width, V vocabulary, P predictions per pack.
"""

import keras
from keras import ops

from bert_packed.architectures.packed_model import PackedModel
from bert_packed.architectures.registry import MASKED_LM
from bert_packed.layers.context import PackContext, gather_tokens
from bert_packed.layers.fast_gradients import Linear
from bert_packed.layers.rematerialisation import rematerialised
from gate.config import GateConfig


class GateBlock(keras.layers.Layer):
    def __init__(self, config, name):
        super().__init__(name=name)
        self.gate, self.mix = (Linear(config.hidden_size, name=part) for part in ("gate", "mix"))

    def build(self, hidden_shape):
        self.gate.build(hidden_shape)
        self.mix.build(hidden_shape)

    def call(self, hidden_BSD, context, training=None):
        own_BSS = ops.cast(context.mask_B1SS[:, 0], hidden_BSD.dtype)
        means_BSD = ops.matmul(own_BSS, hidden_BSD) / ops.sum(own_BSS, axis=-1, keepdims=True)
        return hidden_BSD + ops.sigmoid(self.gate(hidden_BSD)) * self.mix(means_BSD)


@keras.saving.register_keras_serializable(package="test")
class GateModel(PackedModel):
    config_class = GateConfig
    head = MASKED_LM

    def __init__(self, config, name="gates", remat=False):
        super().__init__(config, name)
        self.remat = remat
        self.blocks = [GateBlock(config, f"block_{i}") for i in range(config.num_hidden_layers)]

    def add_weights(self):
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.table_VD = self.add_weight(shape=shape, initializer="random_normal", name="table")
        self.bias_V = self.add_weight(shape=(self.config.vocab_size,), initializer="zeros", name="bias")

    def embed(self, batch):
        return ops.take(self.table_VD, batch["token_ids"], axis=0)

    def encode(self, batch, training=None):
        return self.encode_embedded(self.embed(batch), batch, training)

    def encode_embedded(self, hidden_BSD, batch, training=False):
        context = PackContext(batch["sequence_ids"], batch["position_ids"])
        for block in self.blocks:
            if self.remat:
                hidden_BSD = rematerialised(block, hidden_BSD, context, training)
            else:
                hidden_BSD = block(hidden_BSD, context=context, training=training)
        return hidden_BSD

    def apply_heads(self, hidden_BSD, batch, training=None):
        gathered_BPD = gather_tokens(hidden_BSD, batch["prediction_positions"])
        return {"mlm_logits": ops.matmul(gathered_BPD, ops.transpose(self.table_VD)) + self.bias_V}


def make_model(head, config, num_outputs, remat=False):
    return GateModel(config, remat=remat)


def count_flops(head, config, sums):
    return 6 * 2 * config.hidden_size**2 * config.num_hidden_layers * sums["num_tokens"]
