"""A tiny Mamba as Hugging Face stores it, and packs for it."""

import json

import numpy as np
from next_tokens import batch_of
from safetensors.numpy import save_file

from bert_packed.architectures.mamba.config import MambaConfig

CONFIG = MambaConfig(
    vocab_size=31, hidden_size=12, num_hidden_layers=2, state_size=5, time_step_rank=3, use_bias=True
)
INNER, RANK = 24, 3
# Our names map to (Hugging Face, its shape there), written out by hand
LAYER = {
    "RMSNorm/scale": ("norm.weight", (12,)),
    "mixer/in_proj/kernel": ("mixer.in_proj.weight", (2 * INNER, 12)),
    "mixer/in_proj/bias": ("mixer.in_proj.bias", (2 * INNER,)),
    "mixer/conv1d_kernel": ("mixer.conv1d.weight", (INNER, 1, 4)),
    "mixer/conv1d_bias": ("mixer.conv1d.bias", (INNER,)),
    "mixer/x_proj/kernel": ("mixer.x_proj.weight", (RANK + 2 * 5, INNER)),
    "mixer/dt_proj/kernel": ("mixer.dt_proj.weight", (INNER, RANK)),
    "mixer/dt_proj/bias": ("mixer.dt_proj.bias", (INNER,)),
    "mixer/A_log": ("mixer.A_log", (INNER, 5)),
    "mixer/D": ("mixer.D", (INNER,)),
    "mixer/out_proj/kernel": ("mixer.out_proj.weight", (12, INNER)),
    "mixer/out_proj/bias": ("mixer.out_proj.bias", (12,)),
}
MAX_SEQ_LENGTH, NUM_SLOTS = 24, 6
# Several have one token, several fewer than the convolution's four taps; there are padding and a full pack
LENGTHS = [[5, 1, 3, 9, 2], [2, 7, 1, 1], [20], [6, 1, 17], [1]]


def make_tensors():
    """The same random model twice: our names, Hugging Face's."""
    rng = np.random.default_rng(0)
    ours, theirs = {}, {}

    def add(name, other, shape):
        values = rng.normal(size=shape).astype(np.float32)
        theirs[other] = values
        if len(shape) == 3:  # channels × 1 × taps there, taps × channels here
            values = np.array([[values[channel, 0, tap] for channel in range(shape[0])] for tap in range(4)])
        elif name.endswith("/kernel"):
            values = values.T
        ours[name] = values

    add("backbone/embeddings", "backbone.embeddings.weight", (31, 12))
    for layer in range(2):
        for name, (other, shape) in LAYER.items():
            add(f"backbone/layers_{layer}/{name}", f"backbone.layers.{layer}.{other}", shape)
    add("backbone/RMSNorm/scale", "backbone.norm_f.weight", (12,))
    return ours, theirs


def write_hugging_face(folder, tensors, **changes):
    """A folder with the tensors and the config that transformers would write."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    content = {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "vocab_size": 31,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "state_size": 5,
        "expand": 2,
        "intermediate_size": INNER,
        "conv_kernel": 4,
        "time_step_rank": RANK,
        "use_bias": True,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


def draw_sequences(seed=0):
    """Packs, lists of lists of random tokens, of `LENGTHS`."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(1, 31, length).tolist() for length in lengths] for lengths in LENGTHS]


def make_batch(packs):
    """Such packs as a batch for next-token prediction."""
    return batch_of(packs, MAX_SEQ_LENGTH, NUM_SLOTS)
