"""Packed BERT as a Keras model: inputs named as in the model code, heads on every sequence of the pack.

Legend: B packs per batch, S pack length, D model width, P predictions per pack, K sequences per pack,
V vocabulary.
"""

import dataclasses
import functools

import keras
from keras import ops

from bert_packed.config import ModelConfig
from bert_packed.models.layers import (
    MaskedLanguageModelHead,
    NextSentenceHead,
    PackedEmbeddings,
    TransformerBlock,
    rematerialised,
    same_sequence,
)

# Which heads a model has: those of pre-training, answer spans, or one label for every sequence
HEADS = PRETRAINING, QUESTION_ANSWERING, CLASSIFICATION = (
    "pretraining",
    "question_answering",
    "classification",
)


class PackedEncoder(keras.layers.Layer):
    """Embeddings and encoder blocks over packs; the mask is built here, in the graph, once per batch.

    Args:
        config: `ModelConfig`.
        block: Function `(config, name)` to an encoder block, a layer called as
            `block(hidden_BSD, mask_B1SS, training=...)`. Other architectures plug in here.
        remat: Compute each block again in the backward pass instead of keeping its activations.
        attend: As in `layers.SelfAttention`, for every block; None for the dense mask.
    """

    def __init__(self, config, block=TransformerBlock, remat=False, attend=None, name="bert", **kwargs):
        super().__init__(name=name, **kwargs)
        self.remat = remat
        self.attend = attend
        self.config = config
        self.embeddings = PackedEmbeddings(config)
        given = {} if attend is None else {"attend": attend}  # a block of another kind knows nothing of it
        self.blocks = [block(config, name=f"layer_{i}", **given) for i in range(config.num_hidden_layers)]

    def build(self, *_):
        self.embeddings.build()
        for block in self.blocks:
            block.build((None, None, self.config.hidden_size))
        self.built = True

    def call(self, token_ids_BS, sequence_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        hidden_BSD = self.embed(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)
        return self.run_blocks(hidden_BSD, sequence_ids_BS, training=training)

    def embed(self, token_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        """What the encoder blocks start from, float `[B, S, D]`."""
        if self.config.ablation_no_position_reset:
            length = token_ids_BS.shape[1]
            position_ids_BS = ops.zeros_like(position_ids_BS) + ops.arange(length, dtype="int32")
        return self.embeddings(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)

    def run_blocks(self, hidden_BSD, sequence_ids_BS, training=None):
        """The encoder after its embeddings."""
        if self.config.ablation_no_attention_mask:
            sequence_ids_BS = ops.minimum(sequence_ids_BS, 1)  # padding stays apart, as in BERT
        # A fused kernel compares the ids itself: the S x S mask is what it is there to avoid
        mask_B1SS = same_sequence(sequence_ids_BS) if self.attend is None else sequence_ids_BS
        for block in self.blocks:
            run = functools.partial(rematerialised, block) if self.remat else block
            hidden_BSD = run(hidden_BSD, mask_B1SS, training=training)
        return hidden_BSD


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForPretraining(keras.Model):
    """Packed BERT with its two pre-training heads.

    Call it with a dict of int32 arrays; the shapes fix S, P and K at the first call:

    | input | shape | special values |
    |---|---|---|
    | `token_ids` | `[B, S]` | 0 is padding |
    | `sequence_ids` | `[B, S]` | 1..K, 0 is padding |
    | `token_type_ids` | `[B, S]` | sentence A is 0, B is 1 |
    | `position_ids` | `[B, S]` | restarts at 0 in every sequence |
    | `prediction_positions` | `[B, P]` | unused slots hold 0 |
    | `cls_positions` | `[B, K]` | unused slots hold 0 |

    Further keys are ignored, so that a whole batch may be passed. Returns a dict of `mlm_logits`, float32
    `[B, P, V]`, and `nsp_logits`, float32 `[B, K, 2]`.
    """

    head = PRETRAINING

    def __init__(
        self, config, block=TransformerBlock, remat=False, attend=None, name="pretraining", **kwargs
    ):
        super().__init__(name=name, **kwargs)
        self.config = config
        self.block = block
        self.bert = PackedEncoder(config, block, remat, attend)
        self.predictions = MaskedLanguageModelHead(config)
        self.next_sentence = NextSentenceHead(config)

    def build(self, *_):
        self.bert.build()
        self.predictions.build()
        self.next_sentence.build((None, None, self.config.hidden_size))
        self.built = True

    def call(self, batch, training=None):
        hidden_BSD = self.encode(batch, training=training)
        return self.apply_heads(hidden_BSD, batch["prediction_positions"], batch["cls_positions"])

    def apply_heads(self, hidden_BSD, prediction_positions_BP, cls_positions_BK):
        """The outputs of `call` from the hidden states of `encode`."""
        table_VD = self.bert.embeddings.word_embeddings_VD
        return {
            "mlm_logits": self.predictions(hidden_BSD, prediction_positions_BP, table_VD),
            "nsp_logits": self.next_sentence(hidden_BSD, cls_positions_BK),
        }

    def get_config(self):
        """What a `.keras` file needs to make the model again; raises `ValueError` for another block."""
        if self.block is not TransformerBlock:
            raise ValueError(f"`block` must be TransformerBlock to be saved. Received: {self.block}.")
        return {"config": dataclasses.asdict(self.config), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """The model of `get_config`, with all its variables."""
        model = cls(ModelConfig(**config["config"]), name=config["name"])
        model.build()
        return model

    def encode(self, batch, training=None):
        """Hidden states of every token, float `[B, S, D]`."""
        return self.bert(
            batch["token_ids"],
            batch["sequence_ids"],
            batch["token_type_ids"],
            batch["position_ids"],
            training=training,
        )

    def embed(self, batch):
        """What the encoder blocks start from, float `[B, S, D]`, without dropout."""
        return self.bert.embed(
            batch["token_ids"], batch["token_type_ids"], batch["position_ids"], training=False
        )

    def encode_embedded(self, hidden_BSD, batch):
        """The hidden states of `encode` from those of `embed`, without dropout."""
        return self.bert.run_blocks(hidden_BSD, batch["sequence_ids"], training=False)


def build_pretraining_model(config, seed, block=TransformerBlock, dtype="float32", remat=False, attend=None):
    """A model with all its variables, from a seed.

    Args:
        config: `ModelConfig`.
        seed: Whole number; initial weights and dropout follow from it.
        block: Encoder block, see `PackedEncoder`.
        dtype: Keras policy of every layer: "float32", or "mixed_bfloat16", which computes in bfloat16 from
            float32 weights; softmax, layer-norm statistics and logits stay float32, unrounded.
        remat, attend: As in `PackedEncoder`.
    """
    return build_seeded(lambda: PackedBertForPretraining(config, block, remat, attend), seed, dtype)


def build_seeded(make_model, seed, dtype="float32"):
    """A model with all its variables, from a seed.

    Args:
        make_model: Function to a Keras model, not yet built.
        seed, dtype: As in `build_pretraining_model`.
    """
    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    # The one way to reach every layer, those of other people's blocks too; nothing outside sees it
    keras.config.set_dtype_policy(dtype)
    try:
        model = make_model()
        model.build()
    finally:
        keras.config.set_dtype_policy(before)
    return model
