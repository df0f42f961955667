"""Names of ModernBERT's tensors here and in Hugging Face's files.

    here                                        Hugging Face
    modern_bert/token_embeddings                model.embeddings.tok_embeddings.weight
    modern_bert/layer_0/attention/qkv/kernel    model.layers.0.attn.Wqkv.weight^T
    predictions/transform/kernel                head.dense.weight^T

`^T`: stored as outputs × inputs there, as inputs × outputs here. The output matrix is the token embeddings.
"""

from bert_packed.architectures import registry
from bert_packed.architectures.modern_bert.config import FULL_ATTENTION, SLIDING_ATTENTION
from bert_packed.architectures.registry import CheckpointNames, TensorName, config_json, linear_names
from bert_packed.text.vocabularies import encoder_ids

_EMBEDDINGS = TensorName("modern_bert/token_embeddings", "model.embeddings.tok_embeddings.weight")
# The order is that of the family's heads
_CLASSIFIERS = registry.QUESTION_ANSWERING, registry.TOKEN_CLASSIFICATION, registry.CLASSIFICATION


def tensor_names(config, head=registry.MASKED_LM):
    """The table for a `ModernBertConfig` and a head: list of `TensorName`."""
    norm = config.norm_bias
    table = [_EMBEDDINGS]
    table += _norm("modern_bert/embeddings_LayerNorm", "model.embeddings.norm", norm)
    for i in range(config.num_hidden_layers):
        ours, theirs = f"modern_bert/layer_{i}", f"model.layers.{i}"
        if i > 0:
            table += _norm(f"{ours}/attention_LayerNorm", f"{theirs}.attn_norm", norm)
        table += linear_names(f"{ours}/attention/qkv", f"{theirs}.attn.Wqkv", config.attention_bias)
        table += linear_names(f"{ours}/attention/output", f"{theirs}.attn.Wo", config.attention_bias)
        table += _norm(f"{ours}/feed_forward_LayerNorm", f"{theirs}.mlp_norm", norm)
        table += linear_names(f"{ours}/feed_forward/intermediate", f"{theirs}.mlp.Wi", config.mlp_bias)
        table += linear_names(f"{ours}/feed_forward/output", f"{theirs}.mlp.Wo", config.mlp_bias)
    table += _norm("modern_bert/final_LayerNorm", "model.final_norm", norm)
    if head not in NAMES.classes or head == registry.EMBEDDING:
        return table
    ours = "predictions" if head == registry.MASKED_LM else head
    table += linear_names(f"{ours}/transform", "head.dense", config.classifier_bias)
    table += _norm(f"{ours}/LayerNorm", "head.norm", norm)
    if head != registry.MASKED_LM:
        table += linear_names(f"{ours}/classifier", "classifier")
    elif config.decoder_bias:
        table.append(TensorName("predictions/output_bias", "decoder.bias"))
    return table


def _norm(ours, theirs, has_bias):
    rows = [TensorName(f"{ours}/gamma", f"{theirs}.weight")]
    return rows + ([TensorName(f"{ours}/beta", f"{theirs}.bias")] if has_bias else [])


def _hugging_face_config(model):
    config = model.config
    labels = {} if model.num_classes is None else {"num_labels": model.num_classes}
    thetas = {FULL_ATTENTION: config.global_rope_theta, SLIDING_ATTENTION: config.local_rope_theta}
    return {
        "tie_word_embeddings": True,
        # transformers 4 reads three numbers, which `config_json` has, in the place of the next two
        "layer_types": config.layer_types,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": v} for k, v in thetas.items()},
        **labels,
        **config_json(config),
    }


NAMES = CheckpointNames(
    tensor_names=tensor_names,
    # Masked tokens' head is known by its first layer, since a decoder may have no bias
    outputs={
        registry.MASKED_LM: linear_names("predictions/transform", "head.dense", False)[0],
        **{head: linear_names(f"{head}/classifier", "classifier")[1] for head in _CLASSIFIERS},
    },
    encoder="modern_bert/",
    prefix="model.",
    bare_parts=("embeddings", "layers", "final_norm"),
    tied=(("decoder.weight", _EMBEDDINGS.hugging_face),),
    shapeless=(
        *("num_attention_heads", "hidden_activation", "norm_eps", "local_attention"),
        *("global_attn_every_n_layers", "attention_bias", "mlp_bias", "norm_bias"),
        *("decoder_bias", "classifier_bias", "classifier_activation"),
    ),
    classes={
        registry.MASKED_LM: "ModernBertForMaskedLM",
        registry.QUESTION_ANSWERING: "ModernBertForQuestionAnswering",
        registry.TOKEN_CLASSIFICATION: "ModernBertForTokenClassification",
        registry.CLASSIFICATION: "ModernBertForSequenceClassification",
        registry.EMBEDDING: "ModernBertModel",
    },
    hugging_face_config=_hugging_face_config,
    # transformers takes those of the published vocabulary where they are missing, and a table of 50,284 rows
    token_ids=encoder_ids,
    vocabularies=("tokenizer.json", "vocab.txt"),
)
