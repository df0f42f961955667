"""Arguments of `PackingCollator` that are exact for models of transformers, by tiny random ones.

python -m benchmarks.audited_models
"""

import dataclasses
import functools
import sys

from benchmarks.runner import Settings, parse_names, show
from bert_packed.core.command_line import run
from bert_packed.core.settings import setting

ENCODERS = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2"),
    *("distilbert", "electra", "ernie", "esm", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert"),
    *("jina_embeddings_v3", "layoutlm", "longformer", "megatron-bert", "mobilebert", "modernbert", "mpnet"),
    *("mra", "nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roformer"),
    *("squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"),
)
CAUSAL = (
    *("biogpt", "bloom", "cohere", "cohere2", "ctrl", "falcon", "gemma", "gemma2", "gemma3_text", "glm4"),
    *("gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "mistral", "mixtral"),
    *("modernbert-decoder", "mpt", "olmo", "olmo2", "olmo3", "openai-gpt", "opt", "phi", "phi3", "qwen2"),
    *("qwen3", "smollm3", "stablelm", "starcoder2", "xglm", "xlnet"),
    # With states
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2"),
    *("qwen3_next", "recurrent_gemma", "rwkv", "zamba2"),
)
MODEL_TYPES = *ENCODERS, *CAUSAL
WINDOW = 4
SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
    **{name: number for number, name in enumerate(["pad_token_id", "bos_token_id", "eos_token_id"])},
    **{"cls_token_id": 1, "sep_token_id": 2},
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
WINDOWS = {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}
LOCAL_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
# Sizes that a model has under other names; None for those of the others that it refuses
OTHER_SIZES = {
    **dict.fromkeys(["cohere2", "gemma2", "gemma3_text", "olmo3"], LOCAL_AND_FULL),
    **dict.fromkeys(["modernbert", "modernbert-decoder"], WINDOWS),
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # the other one mixes sequences
    "falcon": {"head_dim": None},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "num_decoder_layers": 1}
    | {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_oss": LOCAL_AND_FULL | {"num_local_experts": 4},
    "gptj": {"head_dim": None, "rotary_dim": 4},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "longformer": {"attention_window": WINDOW},
    "mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "mpnet": {"pad_token_id": 1, "bos_token_id": 0},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2}
    | {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts_per_tok": 1}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "squeezebert": {"embedding_size": 16}
    | {f"{part}_groups": 1 for part in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "xlnet": {"max_position_embeddings": None, "d_head": 8, "d_inner": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {"chunk_size": 8, "layers_block_type": ["mamba", "hybrid"]},
}
IMPLEMENTATIONS = "eager", "sdpa"
ATTENTIONS = "mask", "positions"  # "varlen" needs other kernels
NEIGHBOURS, ALONE = "neighbors: change of outputs", "unpacked: outputs"


@dataclasses.dataclass(frozen=True)
class AuditedModelsConfig(Settings):
    """Audits of tiny random models of transformers, with two layers and local attention in one of them where
    the model has it, under "eager" and "sdpa": for each `attention` of `PackingCollator`, the arguments that
    are exact, or what happens under all. The difference is that of the nearest from sequences alone, relative
    to the largest value.
    """

    models: str = setting(
        ",".join(MODEL_TYPES),
        "`model_type` of each model to audit",
        parse=functools.partial(parse_names, known=MODEL_TYPES),
    )


def main(config):
    """Audit, print and write."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = [row for name in config.models.split(",") for row in model_rows(name)]
    note = f"{len(rows)} rows, transformers {transformers.__version__}, torch {torch.__version__}, on a CPU."
    show("audited_models", config, {"models": rows}, [note], how="Audited")


def model_rows(model_type):
    """A row of a model; two where it has other exact arguments under another implementation of attention."""
    from bert_packed.torch.exact_arguments import find_arguments

    rows = {}
    for name in IMPLEMENTATIONS:
        if not (model := build(model_type, name)):
            continue
        nearest, cells = [], {}
        for attention in ATTENTIONS:
            cells[attention], difference = outcome(find_arguments(model, attention=attention))
            nearest += [] if difference is None else [difference]
        shown = (type(model).__name__, *cells.items())
        rows.setdefault(shown, ([], nearest))[0].append(name)
    return [
        {"model": model, "under": ", ".join(names), **dict(cells), "difference": min(nearest, default=None)}
        for (model, *cells), (names, nearest) in rows.items()
    ]


def outcome(candidates):
    """What is exact, with the fewest arguments, or what happens; and the difference from sequences alone."""
    found = []
    for one in candidates:
        checks = {check.name: check.largest for check in getattr(one.result, "checks", ())}
        if one.is_exact:
            more = {"first_position": one.inputs.first_position, "sliding_window": one.inputs.sliding_window}
            more = list(filter(more.get, more))
            found.append((len(more), " with ".join(["exact", *more]), checks[ALONE]))
        elif not checks:
            found.append((5, "an error", None))
        elif checks[NEIGHBOURS] > 1e-5:  # experts compute tokens together, which rounds
            found.append((4, "neighbors are seen", checks[ALONE]))
        else:
            found.append((3, "not as alone", checks[ALONE]))
    return min(found)[1:]


def build(model_type, attention):
    """A tiny model with random weights, without dropout; None where it has no such attention."""
    import torch
    import transformers

    sizes = SIZES | OTHER_SIZES.get(model_type, {})
    sizes = {name: value for name, value in sizes.items() if value is not None}
    settings = transformers.AutoConfig.for_model(model_type, **sizes)
    kind = transformers.AutoModelForMaskedLM if model_type in ENCODERS else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    try:
        model = kind.from_config(settings, attn_implementation=attention).eval()
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        return None
    with torch.no_grad():  # initial weights are so small that attention would hardly count
        for value in filter(lambda value: value.requires_grad, model.parameters()):
            value += 0.2 * torch.randn_like(value)
    return model


if __name__ == "__main__":
    sys.exit(run(main, AuditedModelsConfig))
