"""Names of Mamba's tensors here and in Hugging Face's files.

    here                                    Hugging Face
    backbone/layers_0/mixer/in_proj/kernel  backbone.layers.0.mixer.in_proj.weight^T
    backbone/layers_0/mixer/conv1d_kernel   backbone.layers.0.mixer.conv1d.weight, channels × 1 × taps
    backbone/layers_0/RMSNorm/scale         backbone.layers.0.norm.weight

`^T`: stored as outputs × inputs there, as inputs × outputs here. The output matrix is the token embeddings.
"""

from bert_packed.architectures.registry import CheckpointNames, TensorName, config_json, linear_names
from bert_packed.schema import CAUSAL_LM
from bert_packed.text.vocabularies import boundary_ids

_EMBEDDINGS = TensorName("backbone/embeddings", "backbone.embeddings.weight")
# Every `config.json` has these, so that no default of transformers applies
FIXED = {"hidden_act": "silu", "pad_token_id": 0, "residual_in_fp32": True}


def backbone_names(config, mixer):
    """The table of embeddings, blocks and norms; `mixer(config, ours, theirs)` is that of a mixer."""
    table = [_EMBEDDINGS, TensorName("backbone/RMSNorm/scale", "backbone.norm_f.weight")]
    for i in range(config.num_hidden_layers):
        ours, theirs = f"backbone/layers_{i}", f"backbone.layers.{i}"
        table.append(TensorName(f"{ours}/RMSNorm/scale", f"{theirs}.norm.weight"))
        table += mixer(config, f"{ours}/mixer", f"{theirs}.mixer")
    return table


def convolution_names(config, ours, theirs):
    """The rows of a mixer's convolution, decays and skip."""
    rows = [TensorName(f"{ours}/conv1d_kernel", f"{theirs}.conv1d.weight", hugging_face_depthwise=True)]
    if config.use_conv_bias:
        rows.append(TensorName(f"{ours}/conv1d_bias", f"{theirs}.conv1d.bias"))
    return rows + [TensorName(f"{ours}/{name}", f"{theirs}.{name}") for name in ("A_log", "D")]


def _mixer(config, ours, theirs):
    rows = convolution_names(config, ours, theirs)
    # `MambaMixer` of transformers has the same biases
    has_bias = {"x_proj": False, "dt_proj": True, **dict.fromkeys(("in_proj", "out_proj"), config.use_bias)}
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        rows += linear_names(f"{ours}/{name}", f"{theirs}.{name}", has_bias[name])
    return rows


def _hugging_face_config(model):
    return {
        **FIXED,
        "tie_word_embeddings": True,
        "intermediate_size": model.config.inner_size,
        **config_json(model.config),
        "time_step_rank": model.config.step_rank,
    }


NAMES = CheckpointNames(
    tensor_names=lambda config, head: backbone_names(config, _mixer),
    outputs={CAUSAL_LM: _EMBEDDINGS},
    encoder="backbone/",
    prefix="backbone.",
    bare_parts=("embedding", "embeddings", "layers", "norm_f"),
    spellings=(("backbone.embedding.", "backbone.embeddings."),),
    tied=(("lm_head.weight", _EMBEDDINGS.hugging_face),),
    shapeless=("layer_norm_epsilon", "use_bias", "use_conv_bias"),
    classes={CAUSAL_LM: "MambaForCausalLM"},
    hugging_face_config=_hugging_face_config,
    # transformers takes token 0 for both where they are missing
    token_ids=boundary_ids,
    vocabularies=("vocab.txt", "tokenizer.json"),
)
