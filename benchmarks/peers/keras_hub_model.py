"""Training steps by KerasHub's BERT on the running backend, as its guides have them.

`BertMaskedLM` on rows padded to one length, compiled by XLA, AdamW. It has no next-sentence head, and
GELU's tanh form in its blocks. It is no extra of this package, since it brings a TensorFlow Text that holds
TensorFlow back: `pip install --no-deps keras-hub`.

Legend: B rows per batch, S row length, P predictions per row.
"""

import importlib.util

import keras
import numpy as np

# KerasHub's names of tensors, or of the layers that they belong to, and ours
_LAYERS = {
    "token_embedding/embeddings": "bert/embeddings/word_embeddings",
    "position_embedding/embeddings": "bert/embeddings/position_embeddings",
    "segment_embedding/embeddings": "bert/embeddings/token_type_embeddings",
    "embeddings_layer_norm": "bert/embeddings/LayerNorm",
    "mlm_head/intermediate_dense": "predictions/transform",
    "mlm_head/intermediate_layer_norm": "predictions/LayerNorm",
    "mlm_head/output_bias": "predictions/output_bias",
}
_LAYERS_OF_BLOCK = {
    **{f"self_attention_layer/{name}": f"attention/{name}" for name in ("query", "key", "value")},
    "self_attention_layer/attention_output": "attention/output",
    "self_attention_layer_norm": "attention/LayerNorm",
    "feedforward_intermediate_dense": "feed_forward/intermediate",
    "feedforward_output_dense": "feed_forward/output",
    "feedforward_layer_norm": "feed_forward/LayerNorm",
}
_UNUSED = "pooled_dense"


def is_installed():
    """True if KerasHub can be imported."""
    return importlib.util.find_spec("keras_hub") is not None


def copy_model(model_config, weights):
    """KerasHub's `BertMaskedLM` with our weights, a dict from our names."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=model_config.vocab_size,
        num_layers=model_config.num_hidden_layers,
        num_heads=model_config.num_attention_heads,
        hidden_dim=model_config.hidden_size,
        intermediate_dim=model_config.intermediate_size,
        dropout=model_config.hidden_dropout_prob,
        max_sequence_length=model_config.max_position_embeddings,
        num_segments=model_config.type_vocab_size,
    )
    backbone.get_layer(_UNUSED).trainable = False  # no output comes from it
    model = keras_hub.models.BertMaskedLM(backbone=backbone)
    for variable in model.weights:
        if not variable.path.startswith(_UNUSED):
            values = keras.ops.convert_to_numpy(weights[our_name(variable.path)])
            variable.assign(values.reshape(variable.shape))
    return model


def our_name(path):
    """Our name of a tensor of theirs."""
    layer, _, tensor = path.rpartition("/")
    block, _, rest = layer.partition("/")
    if block.startswith("transformer_layer_"):
        number = block.removeprefix("transformer_layer_")
        return f"bert/layer_{number}/{_LAYERS_OF_BLOCK[rest]}/{tensor}"
    return _LAYERS[path] if path in _LAYERS else f"{_LAYERS[layer]}/{tensor}"


class Training:
    """Training steps of a `BertMaskedLM` from `copy_model`, by AdamW with clipping."""

    def __init__(self, model, learning_rate, weight_decay, max_grad_norm):
        self._model = model
        self._model.compile(
            keras.optimizers.AdamW(learning_rate, weight_decay, global_clipnorm=max_grad_norm),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
            weighted_metrics=[],
            jit_compile=True,
        )

    def loss(self, batch):
        """Mean loss of the predictions of a batch dict at depth 1, without dropout."""
        return float(self._model.test_on_batch(*arguments_of(batch)))

    def step(self, batch):
        """One optimizer step on a batch dict at depth 1; returns its loss."""
        return float(self._model.train_on_batch(*arguments_of(batch)))


def arguments_of(batch):
    """Inputs, labels and their weights for a batch dict at depth 1."""
    inputs = {
        "token_ids": batch["token_ids"],
        "segment_ids": batch["token_type_ids"],
        "padding_mask": batch["sequence_ids"],
        "mask_positions": batch["prediction_positions"],
    }
    return inputs, batch["prediction_ids"], (batch["prediction_sequences"] > 0).astype(np.float32)
