"""Tiny models of transformers for packs, and a plain attention of variable length among its kernels."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
from reference import import_reference

torch, transformers = import_reference()

LENGTH, VOCAB = 24, 60
LEARNING_RATE = 0.1
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = {"pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": SEP}
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
WINDOW = 2  # tokens to each side that ModernBERT's second layer sees
CONFIGS = {
    "bert": ("BertForMaskedLM", {"max_position_embeddings": LENGTH}),
    "pretraining": ("BertForPreTraining", {"max_position_embeddings": LENGTH}),
    "roberta": ("RobertaForMaskedLM", {"max_position_embeddings": LENGTH + 1}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}
        | {"cls_token_id": CLS, "sep_token_id": SEP},
    ),
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 3, "num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "wide_mistral": (
        "MistralForCausalLM",
        {"sliding_window": 20, "num_key_value_heads": 2, "eos_token_id": [SEP, MASK]},
    ),
    "convbert": ("ConvBertForMaskedLM", {"max_position_embeddings": LENGTH}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "opt": ("OPTForCausalLM", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "mamba": ("MambaForCausalLM", {"state_size": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2, "head_dim": 8}
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts_per_tok": 1},
    ),
}


def build(kind, attention="sdpa"):
    name, options = CONFIGS[kind]
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = model_class.config_class(vocab_size=VOCAB, **{**SIZES, **IDS, **NO_DROPOUT, **options})
    model = model_class(config)
    model.set_attn_implementation(attention)
    with torch.no_grad():  # initial weights are so small that attention would hardly count
        for value in model.parameters():
            value += 0.2 * torch.randn_like(value)
    return model


def make_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(VOCAB - 5))]
    return transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})


def make_trainer(model, rows, collator, folder, batch_size, accumulation=1, settings=None, **options):
    """Make a `Trainer`, or what `make` is, of two steps of plain SGD; `settings` are `TrainingArguments`."""
    defaults = {
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    arguments = transformers.TrainingArguments(str(folder), **defaults | (settings or {}))
    given = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collator} | options
    return given.pop("make", transformers.Trainer)(model, arguments, **given)


def random_rows(num_rows, shortest, longest, seed=0):
    """Rows of random words between [CLS] and [SEP]; the words are `shortest` or more, below `longest`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, num_rows).tolist()
    return [{"input_ids": [CLS, *rng.integers(5, VOCAB, length).tolist(), SEP]} for length in lengths]


def run_example(number):
    """Run a Python example of docs/guides/torch.md in the current folder; returns its names."""
    page = Path(__file__).resolve().parents[1] / "docs/guides/torch.md"
    examples = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(examples[number], page.name, "exec"), names)
    return names


def differing(found, wanted, least=0.0):
    """Names of the tensors that differ by more than 1e-5 of their largest value, or than `least`."""
    assert found.keys() == wanted.keys()
    # Key biases have a gradient of truly 0, and that of sinks is a sum whose terms cancel
    limits = {
        name: 1e-6 if name.endswith(("key.bias", "sinks")) else max(least, 1e-5 * want.abs().max().item())
        for name, want in wanted.items()
    }
    return [name for name in wanted if (found[name] - wanted[name]).abs().max().item() > limits[name]]


def gradients_of(model):
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def plain_varlen(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **given):
    """Attention over the ranges that it is given, as kernels of variable length have it."""
    assert attention_mask is None
    num_rows, _, length, _ = query.shape
    query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))  # [B * S, N, H]
    parts, offsets = [], list(range(0, len(query) + 1, length))
    if "cu_seq_lens_q" in given:
        offsets = given["cu_seq_lens_q"].tolist()
        assert given["cu_seq_lens_k"].tolist() == offsets and offsets[-1] == len(query)
        assert given["max_length_q"] == given["max_length_k"] == max(np.diff(offsets))
    for start, end in itertools.pairwise(offsets):
        assert end > start
        q, k, v = (one[start:end].transpose(0, 1) for one in (query, key, value))
        places = torch.arange(end - start)
        distances = places[:, None] - places
        is_hidden = (distances < 0) if module.is_causal else torch.zeros_like(distances, dtype=torch.bool)
        if sliding_window is not None:  # one more than the configuration says
            is_hidden = is_hidden | (distances.abs() >= sliding_window)
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(is_hidden, -math.inf)
        parts.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
    return torch.cat(parts).unflatten(0, (num_rows, length)), None


transformers.AttentionInterface.register("plain_varlen", plain_varlen)
