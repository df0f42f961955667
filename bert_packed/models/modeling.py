"""Packed BERT as a Keras model: inputs named as in the model code, heads on every sequence of the pack.

Legend: B packs per batch, S pack length, D model width, P predictions per pack, K sequences per pack,
V vocabulary.
"""

import dataclasses
import inspect

import keras
from keras import ops

from bert_packed.config import ModelConfig
from bert_packed.models.context import PackContext
from bert_packed.models.layers import (
    MaskedLanguageModelHead,
    NextSentenceHead,
    PackedEmbeddings,
    TransformerBlock,
)
from bert_packed.models.layout import ONE_DEVICE
from bert_packed.models.packed_model import PackedModel, build_seeded
from bert_packed.models.rematerialisation import run_rematerialised

# Which heads a BERT has: both of pre-training, that of masked tokens alone, answer spans, a label for every
# sequence, or for every token
HEADS = PRETRAINING, MASKED_LM, QUESTION_ANSWERING, CLASSIFICATION, TOKEN_CLASSIFICATION = (
    "pretraining",
    "masked_lm",
    "question_answering",
    "classification",
    "token_classification",
)


class PackedEncoder(keras.layers.Layer):
    """Embeddings and encoder blocks over packs; what the blocks know of a batch is one `PackContext`.

    Args:
        config: `ModelConfig`.
        block: Function `(config, name)` to an encoder block, a layer called as
            `block(hidden_BSD, context=..., training=...)`. Other architectures plug in here.
        remat: Compute each block again in the backward pass instead of keeping its activations.
        attend: As in `layers.SelfAttention`, for every block; None for the dense mask.
        layout: As in `layers.SelfAttention`, for every block.

    Raises:
        ValueError: `block` takes no `attend` or `layout`, and one is given.
    """

    def __init__(
        self,
        config,
        block=TransformerBlock,
        remat=False,
        attend=None,
        layout=ONE_DEVICE,
        name="bert",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        self.remat = remat
        self.config = config
        self.embeddings = PackedEmbeddings(config, layout=layout)
        # A block of another kind may know nothing of them
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
        self.built = True

    def call(self, token_ids_BS, sequence_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        hidden_BSD = self.embed(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)
        return self.run_blocks(hidden_BSD, sequence_ids_BS, position_ids_BS, training=training)

    def embed(self, token_ids_BS, token_type_ids_BS, position_ids_BS, training=None):
        """What the encoder blocks start from, float `[B, S, D]`."""
        position_ids_BS = self._positions(position_ids_BS)
        return self.embeddings(token_ids_BS, token_type_ids_BS, position_ids_BS, training=training)

    def run_blocks(self, hidden_BSD, sequence_ids_BS, position_ids_BS, training=None):
        """The encoder after its embeddings."""
        if self.config.ablation_no_attention_mask:
            sequence_ids_BS = ops.minimum(sequence_ids_BS, 1)  # padding stays apart, as in BERT
        context = PackContext(sequence_ids_BS, self._positions(position_ids_BS))
        if self.remat:
            return run_rematerialised(self.blocks, hidden_BSD, context, training)
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, context=context, training=training)
        return hidden_BSD

    def _positions(self, position_ids_BS):
        """The positions that count: those given, unless an ablation lets them go on through the pack."""
        if not self.config.ablation_no_position_reset:
            return position_ids_BS
        return ops.zeros_like(position_ids_BS) + ops.arange(position_ids_BS.shape[1], dtype="int32")


class PackedBert(PackedModel):
    """A BERT encoder of packs with heads on it.

    Reads, besides what every `PackedModel` does, `token_type_ids` `[B, S]` (sentence A is 0, B is 1) and
    `cls_positions` `[B, K]`, whose unused slots hold 0.

    Args:
        config: `ModelConfig`.
        encoder: Arguments of `PackedEncoder` besides `config`.
    """

    def __init__(self, config, name, **encoder):
        super().__init__(config, name)
        self.block = encoder.get("block", TransformerBlock)
        self.bert = PackedEncoder(config, **encoder)

    def build_encoder(self):
        self.bert.build()

    def encode(self, batch, training=None):
        return self.bert(
            batch["token_ids"],
            batch["sequence_ids"],
            batch["token_type_ids"],
            batch["position_ids"],
            training=training,
        )

    def embed(self, batch):
        return self.bert.embed(
            batch["token_ids"], batch["token_type_ids"], batch["position_ids"], training=False
        )

    def encode_embedded(self, hidden_BSD, batch):
        return self.bert.run_blocks(hidden_BSD, batch["sequence_ids"], batch["position_ids"], training=False)

    def get_config(self):
        """What a `.keras` file needs to make the model again; raises `ValueError` for another block."""
        if self.block is not TransformerBlock:
            raise ValueError(f"`block` must be TransformerBlock to be saved. Received: {self.block}.")
        return {"config": dataclasses.asdict(self.config), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """The model of `get_config`, with all its variables."""
        model = cls(**{**config, "config": ModelConfig(**config["config"])})
        model.build()
        return model


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForPretraining(PackedBert):
    """Packed BERT with its two pre-training heads.

    Reads, besides what every `PackedModel` does, `prediction_positions` `[B, P]`, whose unused slots hold 0.
    Returns a dict of `mlm_logits`, float32 `[B, P, V]`, and `nsp_logits`, float32 `[B, K, 2]`.

    Args:
        config: `ModelConfig`.
        encoder: Arguments of `PackedEncoder` besides `config`; its `layout` makes the heads' layers too.
    """

    head = PRETRAINING

    def __init__(self, config, name="pretraining", **encoder):
        super().__init__(config, name, **encoder)
        layout = encoder.get("layout", ONE_DEVICE)
        self.predictions = MaskedLanguageModelHead(config, layout=layout)
        self.next_sentence = NextSentenceHead(config, layout=layout)

    def build_heads(self, hidden_shape):
        self.predictions.build()
        self.next_sentence.build(hidden_shape)

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.bert.embeddings.word_embeddings_VD
        return {
            "mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD),
            "nsp_logits": self.next_sentence(hidden_BSD, batch["cls_positions"]),
        }


@keras.saving.register_keras_serializable(package="bert_packed")
class PackedBertForMaskedLM(PackedBert):
    """Packed BERT that predicts masked tokens and no next sentences: it has no pooler either.

    Reads `prediction_positions` and returns `mlm_logits` as `PackedBertForPretraining`; arguments as of it.
    """

    head = MASKED_LM

    def __init__(self, config, name="pretraining", **encoder):
        super().__init__(config, name, **encoder)
        self.predictions = MaskedLanguageModelHead(config, layout=encoder.get("layout", ONE_DEVICE))

    def build_heads(self, hidden_shape):
        self.predictions.build()

    def apply_heads(self, hidden_BSD, batch, training=None):
        table_VD = self.bert.embeddings.word_embeddings_VD
        return {"mlm_logits": self.predictions(hidden_BSD, batch["prediction_positions"], table_VD)}


def build_masked_lm_model(config, seed, dtype="float32", **encoder):
    """`PackedBertForMaskedLM` with all its variables; arguments as of `build_pretraining_model`."""
    return build_seeded(lambda: PackedBertForMaskedLM(config, **encoder), seed, dtype)


def build_pretraining_model(config, seed, dtype="float32", **encoder):
    """A model with all its variables, from a seed.

    Args:
        config: `ModelConfig`.
        seed: Whole number; initial weights and dropout follow from it.
        dtype: Keras policy of every layer: "float32", or "mixed_bfloat16", which computes in bfloat16 from
            float32 weights; softmax, layer-norm statistics and logits stay float32, unrounded.
        encoder: Arguments of `PackedEncoder` besides `config`: `block`, `remat`, `attend`, `layout`.
    """
    return build_seeded(lambda: PackedBertForPretraining(config, **encoder), seed, dtype)
