"""Names of Mamba-2's tensors here and in Hugging Face's files: as those of a Mamba, with another mixer.

here                                    Hugging Face
backbone/layers_0/mixer/dt_bias         backbone.layers.0.mixer.dt_bias
backbone/layers_0/mixer/RMSNorm/scale   backbone.layers.0.mixer.norm.weight
lm_head                                 lm_head.weight, if it is not tied to the embeddings
"""

import dataclasses

from bert_packed.architectures.base_config import LARGEST_FLOAT32
from bert_packed.architectures.mamba import checkpoint_names as mamba_names
from bert_packed.architectures.registry import TensorName, config_json, linear_names
from bert_packed.schema import CAUSAL_LM


def tensor_names(config):
    """The table for a `Mamba2Config`: list of `TensorName`."""
    table = mamba_names.backbone_names(config, _mixer)
    return table if config.tie_word_embeddings else [*table, TensorName("lm_head", "lm_head.weight")]


def _mixer(config, ours, theirs):
    return [
        *mamba_names.convolution_names(config, ours, theirs),
        TensorName(f"{ours}/RMSNorm/scale", f"{theirs}.norm.weight"),
        TensorName(f"{ours}/dt_bias", f"{theirs}.dt_bias"),
        *linear_names(f"{ours}/in_proj", f"{theirs}.in_proj", config.use_bias),
        *linear_names(f"{ours}/out_proj", f"{theirs}.out_proj", config.use_bias),
    ]


def _hugging_face_config(model):
    config = model.config
    return {
        **mamba_names.FIXED,
        "num_heads": config.num_heads,
        # JSON has no infinity
        "time_step_limit": [config.time_step_limit_min, config.time_step_limit_max or LARGEST_FLOAT32],
        **config_json(config),
    }


NAMES = dataclasses.replace(
    mamba_names.NAMES,
    tensor_names=lambda config, head: tensor_names(config),
    # The shapes show only the product of groups and states
    shapeless=(
        *mamba_names.NAMES.shapeless,
        *("n_groups", "time_step_limit_min", "time_step_limit_max", "tie_word_embeddings"),
    ),
    classes={CAUSAL_LM: "Mamba2ForCausalLM"},
    hugging_face_config=_hugging_face_config,
)
